"""The thread of an executor, in whose event loop its crew works; and the executor's tasks, as all other threads see them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final

from .crew import Crew
from .errors import ExecutorBrokenError
from .spawning import main_module
from .tasks import Task, pickled_call
from .worker_process import WorkerOptions

logger = logging.getLogger("gpu_worker_pool.executor")

# More than there are workers: each has a thread while it starts and while it ends.
_MOST_THREADS: Final = 4096

_numbers = itertools.count(1)
# All that there are, for the end of the interpreter and for forks.
threads: weakref.WeakSet[CrewThread] = weakref.WeakSet()


class CrewThread:
    """Runs the tasks of one executor in a thread that starts with the first of them. Safe to use from every thread."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._name = f"GPUExecutor-{next(_numbers)}"
        # A garbage collection may close an executor in a thread that has the lock.
        self._lock = threading.RLock()
        self._crew: Crew | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = threading.Event()
        self._settling = threading.Lock()
        self._settling_thread: int | None = None
        self._task_numbers = itertools.count(1)
        # All that are not settled.
        self._tasks: set[Task] = set()
        self._failure: ExecutorBrokenError | None = None
        self._pid = os.getpid()
        self.is_closed = False
        threads.add(self)

    def __repr__(self) -> str:
        return "0 workers, 0 busy; 0 leases requested; 0 tasks queued" if self._crew is None else repr(self._crew)

    @property
    def is_own(self) -> bool:
        """Whether this is the process that made it, and not a fork of that."""
        return os.getpid() == self._pid

    @property
    def broken(self) -> ExecutorBrokenError | None:
        """Why no task can be done any more."""
        return self._failure or (None if self._crew is None else self._crew.broken)

    def submit(self, future: Future[Any], function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Have it called by a worker. The call is pickled now: later changes of its arguments do not reach it."""
        try:
            call = pickled_call(function, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the user's own __reduce__
            self._check_open()
            future.set_running_or_notify_cancel()
            future.set_exception(error)
            return
        with self._lock:
            self._check_open()
            crew = self._crew or self._start()
            task = Task(next(self._task_numbers), future, call)
            self._tasks.add(task)
            self._post(crew.accept, task)
        future.add_done_callback(partial(self._done, crew, task))

    def close(self, *, cancels_tasks: bool = False) -> None:
        """Accept no more tasks, and end when all are settled."""
        self._close(lambda crew: crew.close(cancels_tasks=cancels_tasks))

    def interrupt(self) -> None:
        """Cancel what waits and end what runs, as Ctrl-C does; called again, at once."""
        self._close(Crew.interrupt)

    def join(self) -> None:
        """Wait until everything is settled and released. A callback of one of its own futures does not wait: it would wait
        for itself.
        """
        if self._crew is not None and self.is_own and threading.get_ident() != self._settling_thread:
            # Not for the thread: until Python 3.13, one whose `join` was interrupted seems to have ended.
            self._ended.wait()

    def forget(self) -> None:
        """Close what a forked process has of its parent's: a guard ends its worker when all ends of its line are closed."""
        self._lock = threading.RLock()
        for worker in self._crew.workers if self._crew is not None else ():
            worker.guarded.forget()

    def _close(self, close: Callable[[Crew], None]) -> None:
        with self._lock:
            self.is_closed = True
            if self._crew is not None and self.is_own:
                self._post(close, self._crew)

    def _check_open(self) -> None:
        if not self.is_own:
            raise RuntimeError("this executor belongs to the process that made it: make another one after a fork")
        if self.broken is not None:
            raise self.broken
        if self.is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _start(self) -> Crew:
        """Start the thread. Where that is not possible (too many open files, say), the caller of `submit` is told."""
        loop = asyncio.new_event_loop()
        try:
            crew = Crew(self._options, main_module(), self._settle)
            threading.Thread(target=self._run, args=(loop, crew), name=self._name, daemon=True).start()
        except BaseException:
            loop.close()
            raise
        self._loop, self._crew = loop, crew
        return crew

    def _done(self, crew: Crew, task: Task, future: Future[Any]) -> None:
        self._tasks.discard(task)
        if future.cancelled():
            self._post(crew.drop, task)

    def _post(self, happen: Callable[..., None], *args: Any) -> None:
        """Have this called in the loop."""
        if self._loop is not None and self._crew is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._crew.take_in, happen, *args)

    def _settle(self, tasks: Iterable[Task], settle: Callable[[Task], None]) -> None:
        """Settle futures, which calls their callbacks: one after the other, as those of other executors. Never in the loop."""
        with self._settling:
            self._settling_thread = threading.get_ident()
            for task in tasks:
                settle(task)
            self._settling_thread = None

    def _run(self, loop: asyncio.AbstractEventLoop, crew: Crew) -> None:
        loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, f"{self._name}-waiting"))
        try:
            loop.run_until_complete(crew.work())
            loop.run_until_complete(loop.shutdown_default_executor())
        except BaseException as error:
            logger.exception("the executor failed")
            # An error of ours must not leave callers waiting for ever.
            self._failure = ExecutorBrokenError(f"the executor failed: {error!r}; please report this")
            self._failure.__cause__ = error
            self._settle(list(self._tasks), partial(Task.fail, error=self._failure))
        finally:
            self._ended.set()
            loop.close()
