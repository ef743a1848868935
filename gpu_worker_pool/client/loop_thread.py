"""An event loop in a thread of its own, which works for other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Undo = Callable[[T], Coroutine[Any, Any, None]]
# How long an interrupted caller waits until its work is undone, and the end of a thread for the last of its work.
END_S = 10.0
_STOPPED = "the pool was stopped meanwhile"


class LoopThread:
    """Runs from when it is made until `end`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._calls: set[_LoopCall[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="gpu-worker-pool", daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller is in this thread."""
        return threading.current_thread() is self._thread

    def work(self, work: Coroutine[Any, Any, T], undo: Undo[T] | None = None) -> T:
        """Wait for work in the loop.

        If the caller is interrupted, the work is cancelled, and what it still brings is undone; without `undo`, it goes on.
        """
        call: _LoopCall[T] | None = None
        try:
            call = _LoopCall(work, self._calls)
            self._calls.add(call)
            try:
                self.loop.call_soon_threadsafe(call.start)
            except RuntimeError:
                raise RuntimeError(_STOPPED) from None
            call.ended.wait()
            return call.result()
        except BaseException:
            call = call or _LoopCall(work, self._calls)
            if call.error is None:
                self._leave_to_loop(call, undo)
            raise

    def _leave_to_loop(self, call: _LoopCall[T], undo: Undo[T] | None) -> None:
        """Have the loop see to the work of an interrupted caller: no signal interrupts its thread."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(call.start if undo is None else partial(call.give_up, undo))
            if undo is not None:
                call.undone.wait(END_S)  # no longer, where a server does not answer

    def end(self) -> None:
        """End the loop and all its work."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(END_S)

    def _run(self) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            for call in self._calls.copy():
                call.fail(_STOPPED)


class _Signal:
    """Set once in the loop, and waited for by one thread.

    The loop takes no lock for it. An Event or a Future has one that an interrupted caller may leave locked for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._gate.release()

    def wait(self, timeout_s: float = -1) -> None:
        if not self._is_set:
            self._gate.acquire(timeout=timeout_s)


class _LoopCall(Generic[T]):
    """Work in the loop. What it brought is kept when its caller is interrupted, so that it can be undone."""

    def __init__(self, work: Coroutine[Any, Any, T], calls: set[_LoopCall[Any]]) -> None:
        self._calls = calls
        self.ended = _Signal()
        # Set when what was given up has left nothing behind.
        self.undone = _Signal()
        self.error: BaseException | None = None
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> asyncio.Task[T]:
        if self._task is None:
            self._task = asyncio.ensure_future(self._work)
            self._task.add_done_callback(self._done)
        return self._task

    def result(self) -> T:
        if self.error is not None or self._task is None:
            raise self.error or RuntimeError(_STOPPED)
        return self._task.result()

    def fail(self, reason: str) -> None:
        if self._task is None or not self._task.done():
            self.error = RuntimeError(reason)
        self.ended.set()

    def give_up(self, undo: Undo[T]) -> None:
        task = self.start()
        task.cancel()
        task.add_done_callback(partial(self._undo, undo))

    def _undo(self, undo: Undo[T], task: asyncio.Task[T]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.undone.set()
        else:
            asyncio.ensure_future(undo(task.result())).add_done_callback(lambda _: self.undone.set())

    def _done(self, task: asyncio.Task[T]) -> None:
        self._calls.discard(self)
        # The loop has ended before it; what an interrupted caller gave up, nobody asks for.
        self.error = RuntimeError(_STOPPED) if task.cancelled() else task.exception()
        self.ended.set()
