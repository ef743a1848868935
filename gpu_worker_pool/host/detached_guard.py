"""The guard of a submitted job: as guard.py, but it and the command go on when the process that started them is gone.

Another keeper connects later, to the guard's own socket, and takes over the line. What became of the command is written to
a file, so that it is known also where no keeper was there. The keeper names that file before it says `start`. Until then,
nothing is run; if that keeper is gone before, the file says so.

A guard that has lost its keeper starts another one, if none has connected after a while: else no warning would reach the
command, and what waits would stand still.

It is run as a program, without the package and without site-packages. Its argument is the descriptor of a socket that
listens. The line to the first keeper is standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .old_guard import Guard, boot_time
else:
    sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120 - quick, and no package is loaded here
    from old_guard import Guard, boot_time

_CREDENTIALS: Final = struct.Struct("3i")
_READ_BYTES: Final = 65536
# How long a guard waits for a keeper before it starts one, and then before it starts the next.
_FIRST_START_S: Final = 2.0
_LAST_START_S: Final = 60.0
# The guards of a box that have lost the same keeper start another one at different times, so that one is enough.
_SPREAD: Final = 16
# From <linux/sched.h>, and the number of clone(2) by machine.
_CLONE_PARENT: Final = 0x8000
_CLONE: Final = {"x86_64": 56, "aarch64": 220, "riscv64": 220}


class LimitedLog:
    """A log of at most `limit` bytes in two files: when one is half of that, it becomes `PATH.old`."""

    def __init__(self, path: str, limit: int) -> None:
        self._path, self._half = path, max(limit // 2, 1)
        self._file = self._open()
        self._size = os.fstat(self._file).st_size

    def write(self, data: bytes) -> None:
        while data:
            part = data[: max(self._half - self._size, 1)]
            with contextlib.suppress(OSError):  # a full disk must not end the command
                os.write(self._file, part)
            self._size += len(part)
            data = data[len(part) :]
            if self._size >= self._half:
                os.close(self._file)
                with contextlib.suppress(OSError):
                    os.replace(self._path, f"{self._path}.old")  # noqa: PTH105 - no package is loaded here
                self._file, self._size = self._open(), 0

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self._path, flags, 0o600)
        except OSError:
            return os.open(os.devnull, flags)  # a folder that was removed must not end the command


class DetachedGuard(Guard):
    """Guards one job. `listener` takes the connections of later keepers."""

    def __init__(self, line: socket.socket, listener: socket.socket) -> None:
        super().__init__(line)
        self._listener = listener
        self._outcome_path: str | None = None
        self._log: LimitedLog | None = None
        self._output: int | None = None
        self._keeper: dict[str, Any] | None = None
        self._start_keeper_at: float | None = None
        self._pause_s = _FIRST_START_S

    def run(self) -> None:
        """Run until the command is gone; where none was started, until the line closes."""
        self._send({"event": "ready"})
        super().run()

    def _obey(self, message: dict[str, Any]) -> None:
        if message["do"] != "prepare":
            super()._obey(message)
            return
        self._outcome_path, self._keeper = message["outcome"], message.get("keeper")
        self._send({"event": "prepared"})

    def _outcome(self) -> dict[str, Any]:
        self._drain()
        outcome = super()._outcome()
        self._note({**outcome, "is_started": True, "ended_at": time.time()})
        return outcome

    def _sources(self) -> list[int]:
        output = [] if self._output is None else [self._output]
        return [*super()._sources(), self._listener.fileno(), *output]

    def _take_in(self, ready: list[int]) -> None:
        if self._output in ready:
            self._copy_output()
        super()._take_in(ready)
        if self._listener.fileno() in ready:
            self._accept()
        if self._start_keeper_at is not None and boot_time() >= self._start_keeper_at:
            self._start_keeper()
            self._start_keeper_at = boot_time() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LAST_START_S)

    def _accept(self) -> None:
        """Take another keeper's line instead of the one before. Only this user and root may have one."""
        line, _ = self._listener.accept()
        _, uid, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if self._command is None or uid not in {0, os.geteuid()}:
            line.close()
            return
        self._line.close()
        self._line, self._is_line_open = line, True
        self._start_keeper_at, self._pause_s = None, _FIRST_START_S
        self._buffer.clear()
        self._send({"event": "running"})

    def _lose_line(self) -> None:
        self._is_line_open = False
        if self._command is None:
            self._note({"is_started": False})
        elif self._keeper is not None:
            self._start_keeper_at = boot_time() + self._pause_s + os.getpid() % _SPREAD / _SPREAD

    def _until_next_deadline_s(self) -> float | None:
        until_s = super()._until_next_deadline_s()
        if self._start_keeper_at is None:
            return until_s
        start_s = max(self._start_keeper_at - boot_time(), 0.0)
        return start_s if until_s is None else min(until_s, start_s)

    def _start_keeper(self) -> None:
        """Start a keeper, unless one has the lock, or the files of the job are gone."""
        keeper, path = self._keeper, self._outcome_path
        if keeper is None or path is None or not os.path.isdir(os.path.dirname(path)):  # noqa: PTH112, PTH120 - see above
            return
        with contextlib.suppress(OSError), open(keeper["lock"], "rb") as lock:  # noqa: PTH123 - see above
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_UN)
            if _fork_beside() == 0:
                _become(keeper["argv"], keeper["env"], keeper["log"])

    def _start(self, message: dict[str, Any]) -> None:
        if message["log_limit"] is not None:
            self._log = LimitedLog(message["log"], message["log_limit"])
            self._output, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            os.set_blocking(theirs, True)
            for place in (1, 2):
                os.close(self._streams[place])
                self._streams[place] = os.dup(theirs)
            os.close(theirs)
        super()._start(message)
        if self._command is None:
            self._note({"is_started": False})

    def _copy_output(self) -> bool:
        """Copy some of the output to the log; False where there is none now."""
        if self._output is None or self._log is None:
            return False
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            os.close(self._output)
            self._output = None
            return False
        self._log.write(data)
        return True

    def _drain(self) -> None:
        while self._copy_output():
            pass

    def _note(self, outcome: dict[str, Any]) -> None:
        """Write the outcome as a whole: the file is there with all of it, or not at all."""
        if self._outcome_path is None:
            return
        new = f"{self._outcome_path}.new"
        with contextlib.suppress(OSError):  # the keeper, if it is there, is told in any case
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                # Its address tells it from the guard of another attempt.
                address = os.fsdecode(self._listener.getsockname()).removeprefix("\0")
                os.write(descriptor, json.dumps({"address": address, **outcome}).encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(new, self._outcome_path)  # noqa: PTH105 - no package is loaded here


def _fork_beside() -> int:
    """Fork a process whose parent is ours. As a descendant of this one, it would be ended with the command."""
    libc = ctypes.PyDLL(None)  # it keeps the lock of the interpreter, which the new process needs at once
    pid: int = libc.syscall(
        ctypes.c_long(_CLONE.get(os.uname().machine, -1)),
        *map(ctypes.c_ulong, (_CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)),
    )
    return pid


def _become(argv: list[str], env: dict[str, str], log: str) -> None:
    """Become this program, with nothing of the guard's: it would keep the address of the guard."""
    try:
        os.setsid()
        os.chdir("/")
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError:
            written = nothing  # a disk that is full
        for number, descriptor in enumerate((nothing, written, written)):
            os.dup2(descriptor, number)
        os.closerange(3, 1 << 16)
        os.execve(argv[0], argv, env)  # noqa: S606 - our own program
    finally:
        os._exit(1)


if __name__ == "__main__":
    DetachedGuard(socket.socket(fileno=0), socket.socket(fileno=int(sys.argv[1]))).run()
