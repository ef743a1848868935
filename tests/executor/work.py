"""Tasks for executors, and a gate at which tasks report and wait until a test lets them go on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

MOST_S = 60.0


class Gate:
    """A socket in a folder. A task of this process or any other that knows the path can report there."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "gate")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(64)
        self._socket.settimeout(MOST_S)
        self._visitors: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in (self._socket, *self._visitors):
            end.close()

    def wait(self) -> Visitor:
        """The next task that reports."""
        connection, _ = self._socket.accept()
        connection.settimeout(MOST_S)
        self._visitors.append(connection)
        with connection.makefile("r") as lines:
            told = json.loads(lines.readline())
        return Visitor(connection, **told)


@dataclass
class Visitor:
    """A task that has reported, and waits."""

    connection: socket.socket
    pid: int
    env: Mapping[str, str]
    says: Any = None

    @property
    def gpu(self) -> str:
        return self.env["CUDA_VISIBLE_DEVICES"]

    def let_go(self, answer: object = None) -> None:
        """Let it go on; it returns this."""
        self.connection.sendall(json.dumps(answer).encode() + b"\n")
        self.connection.close()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.connection.close()


def report(path: str, says: object = None) -> Any:
    """Report at the gate and wait; returns what it is told there."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(MOST_S)
        line.connect(path)
        line.sendall(json.dumps({"pid": os.getpid(), "env": dict(os.environ), "says": says}).encode() + b"\n")
        return json.loads(line.makefile("r").readline() or "null")


def report_when_interrupted(path: str) -> Any:
    """Report, and report again if Ctrl-C comes meanwhile; then go on with Ctrl-C."""
    try:
        return report(path)
    except KeyboardInterrupt:
        report(path, "interrupted")
        raise


def report_and_stay(path: str) -> None:
    """Report, and again if Ctrl-C comes; go on whatever comes except SIGKILL."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda *_: report(path, "interrupted"))
    report(path)
    threading.Event().wait()


def report_with_child(path: str) -> Any:
    """Start a process that outlives its parent unless it is ended, and report its pid."""
    program = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'!'); signal.pause()"
    # In a session of its own, as a daemon is.
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    child.stdout.read(1)
    return report(path, child.pid)


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def fail(text: str) -> NoReturn:
    raise LookupError(text)


def interrupt_once(path: str) -> None:
    """As Ctrl-C does, in the first process that calls it."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


class NeedsTwoError(Exception):
    """Can be pickled and not unpickled, as many exceptions of people's own."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Unpicklable(Exception):  # noqa: N818 - what it is
    def __reduce__(self) -> NoReturn:
        raise TypeError("it cannot be pickled")


def raise_error(kind: str) -> NoReturn:
    raise NeedsTwoError(1, 2) if kind == "needs two" else Unpicklable("of my own")


class ExplodesHere:
    """Can be unpickled in one process only: where it was made."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["pid"] != os.getpid():
            raise LookupError("not in this process")


def return_exploding() -> ExplodesHere:
    return ExplodesHere()


def take_exploding(_: ExplodesHere) -> None: ...


def initialize_with_queue(queue: Any) -> None:
    queue.put(os.getpid())


def fail_to_initialize() -> NoReturn:
    raise LookupError("no such model")


def sum_of(numbers: list[int]) -> int:
    return sum(numbers)


def size_of(data: bytes) -> int:
    return len(data)


def attach(name: str) -> int:
    memory = SharedMemory(name)
    try:
        return memory.size
    finally:
        memory.close()


def twice(data: bytes) -> bytes:
    return data * 2


def note_and_square(path: str, number: int) -> int:
    """Note that it has begun, in a way that survives whatever becomes of this process."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, f"{number}\n".encode())
    finally:
        os.close(file)
    return number * number
