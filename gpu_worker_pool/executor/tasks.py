"""The tasks of an executor: their calls as they are sent to a worker, and the futures that are given the answers."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures.process import _RemoteTraceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

from .errors import RemoteTaskError
from .spawning import is_typed_in


@dataclass(slots=True, eq=False)
class Task:
    """A task that is not settled. Later ones have higher numbers. `attempts`: how often it was sent to a worker."""

    number: int
    future: Future[Any]
    call: bytes
    attempts: int = 0
    is_running: bool = False

    def begin(self) -> bool:
        """Whether it may be sent to a worker, perhaps again; False where it was cancelled."""
        if not self.is_running:
            try:
                self.is_running = self.future.set_running_or_notify_cancel()
            except RuntimeError:
                return False  # its caller has settled it
        return self.is_running

    def cancel(self) -> None:
        """Cancel it, if it has not begun, and tell those who wait for it."""
        self.future.cancel()
        with suppress(RuntimeError):
            self.future.set_running_or_notify_cancel()

    def take_answer(self, answer: tuple[bool, bytes]) -> None:
        """Give the future what `worker.run` has answered."""
        has_returned, pickled = answer
        if not has_returned:
            self.fail(travelled(pickled))
            return
        try:
            result = pickle.loads(pickled)  # noqa: S301 - it is our own child's
        except BaseException as error:  # noqa: BLE001 - the user's own code, and it must not end this thread
            self.fail(error)
            return
        with suppress(InvalidStateError):  # its caller has settled it
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Give the future this exception."""
        if self.begin():
            with suppress(InvalidStateError):
                self.future.set_exception(error)


# Settles the futures of these tasks, in the thread that calls it.
Settle = Callable[[Iterable[Task], Callable[[Task], None]], None]


def travelled(answer: bytes) -> BaseException:
    """The exception that a worker has sent, with its traceback there as the cause."""
    text, shown, pickled = pickle.loads(answer)  # noqa: S301 - it is our own child's
    error: BaseException = RemoteTaskError(f"the task raised {shown}")
    try:
        loaded = pickle.loads(pickled) if pickled is not None else None  # noqa: S301 - the same
    except BaseException as problem:  # noqa: BLE001 - the user's own code, and it must not end this thread
        error = RemoteTaskError(f"the task raised {shown}, which cannot be unpickled here ({problem!r})")
    else:
        error = loaded if isinstance(loaded, BaseException) else error
    error.__cause__ = _RemoteTraceback(cast("Any", f'\n"""\n{text}"""'))
    return error


def pickled_call(function: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    """The call; what was typed in goes as it is, by cloudpickle. PicklingError says what to do where that is missing."""
    if not is_typed_in():
        return bytes(ForkingPickler.dumps((function, args, kwargs)))
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        _check_can_be_found(function)
        return bytes(ForkingPickler.dumps((function, args, kwargs)))
    pickled: bytes = cloudpickle.dumps((function, args, kwargs))
    return pickled


def _check_can_be_found(function: Callable[..., Any]) -> None:
    # map wraps it.
    inner = getattr(function, "args", None) or (function,)
    typed = next((one for one in (function, *inner) if getattr(one, "__module__", None) == "__main__"), None)
    if typed is not None:
        name = getattr(typed, "__qualname__", repr(typed))
        raise pickle.PicklingError(
            f"{name} was defined in a notebook or an interactive session, where a worker cannot load it; put it into a module "
            "and import it, or install cloudpickle"
        )
