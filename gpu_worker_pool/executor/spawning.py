"""How a process that a guard has started becomes the only one of a ProcessPoolExecutor.

`multiprocessing` would start a process that has this one's environment, and no guard.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import connection, context, resource_tracker, spawn
from multiprocessing.popen_forkserver import _DupFd
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final

from . import worker as program

_MAIN: Final = "init_main_"


def is_typed_in() -> bool:
    """Whether the main module is that of a notebook or a shell, or comes from -c or standard input: it has no file."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (path is None or not os.path.exists(path))  # noqa: PTH110


def main_module() -> dict[str, Any]:
    """How to load the main module in a worker; nothing, where it was typed in. It is asked for while the program runs: at
    its end, Python forgets it.

    RuntimeError in a process whose main module is only being loaded: it must not start others.
    """
    found = {name: value for name, value in spawn.get_preparation_data("").items() if name.startswith(_MAIN)}
    return {} if is_typed_in() else found


def worker_command() -> list[str]:
    """The program of a worker. Its standard input is the other end of the line that `pool_of_one` was given."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001
    return [os.fsdecode(spawn.get_executable()), *flags, str(Path(program.__file__)), "--multiprocessing-fork"]


def pool_of_one(
    line: socket.socket, main: Mapping[str, Any], initializer: Callable[..., object] | None, initargs: tuple[Any, ...]
) -> ProcessPoolExecutor:
    """A pool of the process at the other end of the line. Its first task must be `worker.answer_first`."""
    start: Any = _PickledApart((initializer, initargs))  # bytes, there
    return ProcessPoolExecutor(1, _Context(partial(_StartedProcess, line)), program.prepare, (dict(main), start))


class _Context(context.SpawnContext):
    """Makes processes that are not started but told what to do: the guard has started them."""

    def __init__(self, start: Callable[[Any], Any]) -> None:
        self._start = start

    def Process(self, **call: Any) -> program.WorkerProcess:  # type: ignore[override] # noqa: N802 - its name in multiprocessing
        return program.WorkerProcess(self._start, **call)


class _PickledApart:
    """Is unpickled as bytes, which `worker.prepare` unpickles: it can tell what goes wrong then."""

    def __init__(self, start: object) -> None:
        self._start = start

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(ForkingPickler.dumps(self._start)),)


class _StartedProcess:
    """Stands for the process in `multiprocessing`, as its Popen objects do: sends it what a spawned process is sent.

    Queues, locks and connections may be among the initializer's arguments, as in ProcessPoolExecutor.
    """

    method = "spawn"
    DupFd = _DupFd

    def __init__(self, line: socket.socket, process: Any) -> None:
        self._line, self._owner = line, os.getpid()
        # What names the process here. It has ended when nothing holds the other end of the line.
        self.pid = self.sentinel = line.fileno()
        # The worker unlinks nothing that belongs to others if it has the tracker of this process.
        tracker = resource_tracker.getfd()
        assert tracker is not None  # noqa: S101 - it runs now
        self._descriptors = [tracker]
        told = spawn.get_preparation_data(process.name)
        setup = {name: value for name, value in told.items() if not name.startswith(_MAIN)}
        pickled = io.BytesIO()
        context.set_spawning_popen(self)  # type: ignore[arg-type] # it is one in all that matters
        try:
            for part in (setup, process):
                ForkingPickler(pickled, pickle.HIGHEST_PROTOCOL).dump(part)
        finally:
            context.set_spawning_popen(None)
        socket.send_fds(line, [b"!"], self._descriptors)
        line.sendall(pickled.getbuffer())

    def duplicate_for_child(self, descriptor: int) -> int:
        """Called while the process is pickled: this is to be open there; its place among all."""
        self._descriptors.append(descriptor)
        return len(self._descriptors) - 1

    def poll(self, flag: int = 0) -> int | None:  # noqa: ARG002 - as in multiprocessing
        """0 once it has ended, and in a fork of this process; how it has ended, its guard knows."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        return 0 if os.getpid() != self._owner or connection.wait([self.sentinel], timeout) else None

    def terminate(self) -> None:
        """Nothing: its guard ends it."""

    kill = close = terminate
