"""The tasks of an executor that are not settled: their futures, and the calls as they were pickled."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import Future, InvalidStateError
from concurrent.futures.process import _RemoteTraceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from . import worker
from .errors import RemoteTaskError
from .worker_process import WorkerAnswer


@dataclass(slots=True)
class _BookedTask:
    future: Future[Any]
    call: bytes
    is_running: bool = False


class TaskBook:
    """Tasks by their numbers. Futures are settled by one thread; each is settled once, and forgotten."""

    def __init__(self) -> None:
        self._tasks: dict[int, _BookedTask] = {}
        self._next = 1
        self._lock = threading.Lock()

    def add(self, future: Future[Any], call: bytes) -> int:
        """Note a task; returns its number. Later ones have higher numbers."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._tasks[number] = _BookedTask(future, call)
            return number

    def begin(self, number: int) -> bytes | None:
        """The call of a task that is about to run, perhaps again; None where it was cancelled."""
        task = self._tasks.get(number)
        if task is None or not (task.is_running or task.future.set_running_or_notify_cancel()):
            self._tasks.pop(number, None)
            return None
        task.is_running = True
        return task.call

    def note_cancelled(self, number: int) -> bool:
        """Forget a task that its caller has cancelled, and tell those who wait for it; returns whether it was there."""
        task = self._tasks.get(number)
        if task is None or task.is_running:
            return False
        del self._tasks[number]
        task.future.set_running_or_notify_cancel()
        return True

    def cancel(self, number: int) -> None:
        """Cancel a task that has not begun."""
        if (task := self._tasks.pop(number, None)) is not None:
            task.future.cancel()
            task.future.set_running_or_notify_cancel()

    def settle(self, answer: WorkerAnswer) -> None:
        """Give a future the result or the exception that a worker has sent."""
        task = self._tasks.pop(answer.task, None)
        if task is None:
            return
        if answer.kind == worker.EXCEPTION:
            _set_exception(task.future, travelled(answer.body))
            return
        try:
            result = pickle.loads(answer.body)  # noqa: S301 - it is our own child's
        except BaseException as error:  # noqa: BLE001 - the user's own code, and it must not end this thread
            _set_exception(task.future, error)
            return
        with suppress(InvalidStateError):  # its caller has settled it
            task.future.set_result(result)

    def fail(self, number: int, error: BaseException) -> None:
        """Give a future this exception."""
        task = self._tasks.pop(number, None)
        if task is not None and (task.is_running or task.future.set_running_or_notify_cancel()):
            _set_exception(task.future, error)

    def fail_all(self, error: BaseException) -> None:
        """Give this exception to all futures that are left."""
        for number in list(self._tasks):
            self.fail(number, error)


def _set_exception(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):  # its caller has settled it
        future.set_exception(error)


def travelled(body: memoryview) -> BaseException:
    """The exception that a worker has sent, with its traceback there as the cause."""
    text, shown, pickled = pickle.loads(body)  # noqa: S301 - it is our own child's
    error: BaseException = RemoteTaskError(f"the task raised {shown}")
    try:
        loaded = pickle.loads(pickled) if pickled is not None else None  # noqa: S301 - the same
    except BaseException as problem:  # noqa: BLE001 - the user's own code, and it must not end this thread
        error = RemoteTaskError(f"the task raised {shown}, which cannot be unpickled here ({problem!r})")
    else:
        error = loaded if isinstance(loaded, BaseException) else error
    error.__cause__ = _RemoteTraceback(cast("Any", f'\n"""\n{text}"""'))
    return error
