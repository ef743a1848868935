"""The worker of a GPUExecutor: the process in which its tasks run, one after the other.

It is run as a program, under a guard, with the environment of its lease; so CUDA sees the right GPUs from the start. It
is prepared as a process that `multiprocessing` spawns: with the main module, the path and the arguments of the executor's
process. Only the standard library is loaded before the user's own modules.

Standard input is the line to the executor. Every message has its length before it. The first one brings descriptors, and
what the worker needs to start; all others to it are tasks. Its answers begin with their kind and the number of the task.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the folder of this file, whose modules are not for the user's programs

import io
import os
import pickle
import signal
import socket
import struct
from collections.abc import Callable, Iterable
from multiprocessing import process, resource_tracker, spawn, util
from multiprocessing.popen_spawn_posix import _DupFd
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, TypeVar

_ResultT = TypeVar("_ResultT")
LENGTH: Final = struct.Struct("!Q")
TASK: Final = struct.Struct("!Q")
# The kind of an answer, and the number of its task; 0 for the first answer, which is not about a task.
ANSWER: Final = struct.Struct("!cQ")
READY, UNFIT, RESULT, EXCEPTION = b"y", b"u", b"r", b"e"
MOST_DESCRIPTORS: Final = 250
# A body up to this size is copied, to be sent in one call.
_COPIED: Final = 65536


class _Unpickler(pickle.Unpickler):
    """Unpickles what was pickled for a new process; descriptors came with the message."""

    def __init__(self, data: bytes, descriptors: list[int]) -> None:
        super().__init__(io.BytesIO(data))
        self._descriptors = descriptors

    def persistent_load(self, number: int) -> Any:
        return _DupFd(self._descriptors[number])


def main() -> None:
    """Run tasks until the line closes."""
    # The tasks' own standard input is empty, as in every process of multiprocessing.
    line = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - quick
        os.dup2(nothing.fileno(), 0)
    try:
        if _start(line):
            while (message := _receive(line)) is not None:
                _run(line, message)
                del message
    except (KeyboardInterrupt, ConnectionError):
        return  # Ctrl-C reached it between two tasks, or the executor's process is gone


def _start(line: socket.socket) -> bool:
    """Prepare this process and call the initializer; returns whether it is ready for tasks."""
    pid = os.getpid()
    header, descriptors, _, _ = socket.recv_fds(line, LENGTH.size, MOST_DESCRIPTORS)
    body = _receive_body(line, header)
    if body is None:
        return False
    try:
        setup, start = pickle.loads(body)  # noqa: S301 - it is our own parent's
        # As multiprocessing.spawn does. While this is set, a main module that makes an executor without
        # `if __name__ == "__main__":` is told so.
        resource_tracker._resource_tracker._fd = descriptors[0]  # type: ignore[attr-defined] # noqa: SLF001
        process.current_process()._inheriting = True  # type: ignore[attr-defined] # noqa: SLF001
        try:
            spawn.prepare(setup)
            initializer, initargs = _Unpickler(start, descriptors).load()
        finally:
            del process.current_process()._inheriting  # type: ignore[attr-defined] # noqa: SLF001
        if initializer is not None:
            initializer(*initargs)
        _end_if_forked(pid)
    except KeyboardInterrupt as error:
        _end_if_forked(pid, error)
        # It was sent to this process, and says nothing about others.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(pid, signal.SIGINT)
        return False
    except BaseException as error:
        _end_if_forked(pid, error)
        import logging  # noqa: PLC0415 - seldom needed, and it loads slowly

        # As ProcessPoolExecutor does, where a handler of the initializer's may see it.
        logging.getLogger("concurrent.futures").critical("Exception in initializer:", exc_info=True)
        # What the initializer has put into queues arrives before the executor is broken.
        util._exit_function()  # type: ignore[attr-defined] # noqa: SLF001 - as a process of multiprocessing ends
        _send(line, UNFIT, 0, _pickled_error(error))
        return False
    _send(line, READY, 0, str(pid).encode())
    return True


def _run(line: socket.socket, message: bytearray) -> None:
    (task,) = TASK.unpack_from(message)
    kind, answer, pid = RESULT, memoryview(b""), os.getpid()
    try:
        function, args, kwargs = pickle.loads(memoryview(message)[TASK.size :])  # noqa: S301 - it is our own parent's
        # No reference is kept: what the task was given and returns may be large.
        answer = _pickler().dumps(function(*args, **kwargs))
        _end_if_forked(pid)
    except BaseException as error:  # noqa: BLE001 - all of them travel, as those of ProcessPoolExecutor do
        _end_if_forked(pid, error)
        kind, answer = EXCEPTION, memoryview(_pickled_error(error))
    _send(line, kind, task, answer)


def call_for_each(function: Callable[..., _ResultT], chunk: Iterable[tuple[Any, ...]]) -> list[_ResultT]:
    """One task of `map`: several calls. It is here because a worker loads the file in which it is."""
    return [function(*args) for args in chunk]


def _end_if_forked(worker: int, error: BaseException | None = None) -> None:
    """End this process if it is not the worker: the user's function has forked, and has come back in the child too. Two
    processes must not answer, nor read tasks from the same line.
    """
    if os.getpid() == worker:
        return
    code = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            code = 1
            sys.excepthook(type(error), error, error.__traceback__)
        util._flush_std_streams()  # type: ignore[attr-defined] # noqa: SLF001 - as a process of multiprocessing ends
    finally:
        os._exit(code & 0xFF)


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


def _send(line: socket.socket, kind: bytes, task: int, body: bytes | memoryview) -> None:
    header = LENGTH.pack(ANSWER.size + len(body)) + ANSWER.pack(kind, task)
    if len(body) <= _COPIED:
        line.sendall(header + body)
    else:
        line.sendall(header)
        line.sendall(body)


def _receive(line: socket.socket) -> bytearray | None:
    """The next message; None when the line is closed."""
    return _receive_body(line, _read(line, LENGTH.size))


def _receive_body(line: socket.socket, header: bytes | bytearray) -> bytearray | None:
    return _read(line, *LENGTH.unpack(header)) if header else None


def _read(line: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        count = line.recv_into(view[done:])
        if count == 0:
            return bytearray()
        done += count
    return buffer


if __name__ == "__main__":
    main()
