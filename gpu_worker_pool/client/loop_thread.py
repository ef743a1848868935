"""An event loop in a thread of its own, which works for other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
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
            return call.future.result()
        except BaseException:
            call = call or _LoopCall(work, self._calls)
            if not call.has_failed:
                self._leave_to_loop(call, undo)
            raise

    def _leave_to_loop(self, call: _LoopCall[T], undo: Undo[T] | None) -> None:
        """Have the loop see to the work of an interrupted caller: no signal interrupts its thread."""
        with suppress(RuntimeError, TimeoutError):  # the loop has ended, or a server does not answer
            self.loop.call_soon_threadsafe(call.start if undo is None else partial(call.give_up, undo))
            if undo is not None:
                call.over.result(END_S)

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


class _LoopCall(Generic[T]):
    """Work in the loop. Its future is never cancelled itself: it would forget a result that just arrives."""

    def __init__(self, work: Coroutine[Any, Any, T], calls: set[_LoopCall[Any]]) -> None:
        self._calls = calls
        self.future: Future[T] = Future()
        # Done when what was given up has left nothing behind.
        self.over: Future[None] = Future()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    @property
    def has_failed(self) -> bool:
        return self.future.done() and self.future.exception() is not None

    def start(self) -> asyncio.Task[T]:
        if self._task is None:
            self._task = asyncio.ensure_future(self._work)
            self._task.add_done_callback(self._done)
        return self._task

    def fail(self, reason: str) -> None:
        if not self.future.done():
            self.future.set_exception(RuntimeError(reason))

    def give_up(self, undo: Undo[T]) -> None:
        task = self.start()
        task.cancel()
        task.add_done_callback(partial(self._undo, undo))

    def _undo(self, undo: Undo[T], task: asyncio.Task[T]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.over.set_result(None)
        else:
            undone = asyncio.ensure_future(undo(task.result()))
            undone.add_done_callback(lambda _: self.over.set_result(None))

    def _done(self, task: asyncio.Task[T]) -> None:
        self._calls.discard(self)
        if task.cancelled():
            self.future.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())
