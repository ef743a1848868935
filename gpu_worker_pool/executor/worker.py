"""What runs in the process of a worker: its start, and one task after the other.

The process is started under a guard, with the environment of its lease, so CUDA sees the right GPUs whatever is imported.
It is then a process of `multiprocessing` in which ProcessPoolExecutor calls the functions below. They answer with bytes and
never raise, so a call, a result or an exception that cannot be pickled or unpickled fails alone. Only the standard library
is loaded before the user's own modules.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the folder of this file, whose modules are not for the user's programs

import os
import pickle
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, process, spawn, util
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

# As many as the kernel passes at once.
MOST_DESCRIPTORS: Final = 253
# What `prepare` could not do, as `_pickled_error` has it.
_failure: bytes | None = None


def main() -> None:
    """Take over the descriptors that came by standard input, and go on as every process that `multiprocessing` spawns."""
    line = socket.socket(fileno=os.dup(0))
    message, received, _, _ = socket.recv_fds(line, 1, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not message:
        return  # the executor's process is gone
    # Where those that are pickled look for theirs, by their places.
    forkserver._forkserver._inherited_fds = received  # type: ignore[attr-defined] # noqa: SLF001
    # The tasks' own standard input is empty, as in every process of multiprocessing.
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - quick
        os.dup2(nothing.fileno(), 0)
    spawn.spawn_main(pipe_handle=line.detach(), tracker_fd=received[0])


class WorkerProcess(SpawnProcess):
    """The process as ProcessPoolExecutor knows it. `start` is called in place of starting one."""

    def __init__(self, start: Callable[[SpawnProcess], Any], **call: Any) -> None:
        super().__init__(**call)
        self._start = start

    def _Popen(self, process_obj: SpawnProcess) -> Any:  # type: ignore[override] # noqa: N802 - the name of multiprocessing
        return self._start(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_start"}

    def run(self) -> None:
        """Call what ProcessPoolExecutor has given it. Ctrl-C between two tasks ends it quietly."""
        with suppress(KeyboardInterrupt):
            super().run()


def prepare(main_module: dict[str, Any], start: bytes) -> None:
    """Load the main module, and call the initializer. `answer_first` tells what went wrong."""
    global _failure  # noqa: PLW0603 - of this process
    try:
        # As multiprocessing.spawn does. While this is set, a main module that makes an executor without
        # `if __name__ == "__main__":` is told so.
        process.current_process()._inheriting = True  # type: ignore[attr-defined] # noqa: SLF001
        try:
            spawn.prepare(main_module)
            initializer, initargs = pickle.loads(start)  # noqa: S301 - it is our own parent's
        finally:
            del process.current_process()._inheriting  # type: ignore[attr-defined] # noqa: SLF001
        if initializer is not None:
            initializer(*initargs)
    except KeyboardInterrupt:
        # It was sent to this process, and says nothing about others.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        import logging  # noqa: PLC0415 - seldom needed, and it loads slowly

        # As ProcessPoolExecutor does, where a handler of the initializer's may see it.
        logging.getLogger("concurrent.futures").critical("Exception in initializer:", exc_info=True)
        # What the initializer has put into queues arrives before the executor is broken.
        util._exit_function()  # type: ignore[attr-defined] # noqa: SLF001 - as a process of multiprocessing ends
        _failure = _pickled_error(error)


def answer_first() -> tuple[int, bytes | None]:
    """The first task: the process id, and why the process can do no task; None: it can."""
    return os.getpid(), _failure


def run(call: bytes) -> tuple[bool, bytes]:
    """Run a task; whether it has returned, and what it has returned or raised."""
    try:
        function, args, kwargs = pickle.loads(call)  # noqa: S301 - it is our own parent's
        # No reference is kept: what the task was given and returns may be large.
        answer = bytes(_pickler().dumps(function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - all of them travel, as those of ProcessPoolExecutor do
        return False, _pickled_error(error)
    return True, answer


def _pickled_error(error: BaseException) -> bytes:
    """The traceback as text, the exception as it prints, and the exception pickled; None where that is impossible."""
    from traceback import format_exception, format_exception_only  # noqa: PLC0415 - the same

    text = "".join(format_exception(error))
    error.__traceback__ = None  # its frames have references to everything
    try:
        shown = format_exception_only(error)[-1].strip()
    except BaseException:  # noqa: BLE001 - the user's own __str__
        shown = type(error).__name__
    pickled: bytes | None = None
    try:
        pickled = bytes(_pickler().dumps(error))
    except BaseException as problem:  # noqa: BLE001 - the user's own __reduce__
        shown = f"{shown}, which cannot be pickled ({problem!r})"
    return pickle.dumps((text, shown, pickled))


def _pickler() -> Any:
    """What can pickle answers: where cloudpickle brought the task, classes may be those of a notebook."""
    return sys.modules.get("cloudpickle", ForkingPickler)


if __name__ == "__main__":
    main()
