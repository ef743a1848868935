"""Stands between `gpu-pool` and the command it runs, and outlives neither by choice.

It is the process that holds the lease: while it lives, the GPU is not given to anybody else, and it ends only when
nothing of the command is left. So whoever is killed, and with -9 too:

- gpu-pool dies: the guard sees its end of the line close, and ends the command, with all that descends from it.
- the guard dies: the kernel kills the command (parent-death signal), and gpu-pool, which inherits what that started, the
  rest.

What the command leaves behind when it ends by itself is ended too: it would go on using a GPU that is no longer its own.

It is run as a program of its own, without the package and without site-packages, so that it starts at once and stays
small. What is said on the line is JSON, each message with its length before it; the standard streams of the command come
with the first one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
# What a terminal or somebody who ends a whole group sends is for gpu-pool and the command to act on, not for the guard.
_NOT_FOR_US: Final = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# How often what does not go is killed again: it may have forked in between.
_KILL_AGAIN_S: Final = 0.05
_LENGTH: Final = struct.Struct("!I")


def become_subreaper() -> None:
    """Have orphans among our descendants become our children, instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(of: int) -> list[int]:
    """The processes that descend from this one, without itself."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    left = [of]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def frame(message: dict[str, Any]) -> bytes:
    """A message as it goes over the line."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def unframe(buffer: bytearray) -> Iterator[dict[str, Any]]:
    """The whole messages in what has come so far; they are taken out of it."""
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        if len(buffer) < _LENGTH.size + length:
            return
        body = bytes(buffer[_LENGTH.size : _LENGTH.size + length])
        del buffer[: _LENGTH.size + length]
        yield json.loads(body)


class Guard:
    """One command, from before it is started until nothing of it is left."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._buffer = bytearray()
        self._streams: list[int] = []
        self._command: int | None = None
        self._status: int | None = None
        self._orphan_grace_s = 0.0
        self._kill_at: float | None = None
        self._is_line_open = True
        self._inherited = {number: signal.getsignal(number) for number in _NOT_FOR_US}

    def run(self) -> None:
        """Until the command is gone; or until the line closes, where there was never one."""
        become_subreaper()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in _NOT_FOR_US:
            signal.signal(number, signal.SIG_IGN)
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while not self._is_over():
            lines = [self._line.fileno()] if self._is_line_open else []
            ready, _, _ = select.select([wake, *lines], [], [], self._nap_s())
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._line.fileno() in ready:
                self._listen()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = time.monotonic() + _KILL_AGAIN_S
                self._signal_all(signal.SIGKILL)
        if self._status is not None:
            self._say({"event": "ended", "status": self._status})

    def _is_over(self) -> bool:
        if self._command is None:
            return not self._is_line_open
        return self._status is not None and not descendants(os.getpid())

    def _nap_s(self) -> float | None:
        return None if self._kill_at is None else max(self._kill_at - time.monotonic(), 0.0)

    def _listen(self) -> None:
        try:
            if self._streams:
                data = self._line.recv(65536)
            else:
                data, self._streams, _, _ = socket.recv_fds(self._line, 65536, 3)
        except OSError:
            data = b""
        if not data:
            self._is_line_open = False
            self._end(self._orphan_grace_s)
            return
        self._buffer += data
        for message in unframe(self._buffer):
            match message["do"]:
                case "start":
                    self._start(message)
                case "signal":
                    self._signal_all(message["number"])
                case "end":
                    self._end(message["grace_s"])

    def _start(self, message: dict[str, Any]) -> None:
        self._orphan_grace_s = message["grace_s"]
        try:
            started = subprocess.Popen(  # noqa: S603 - the user's command is what this is for
                message["command"],
                env=message["env"],
                cwd=message["folder"],
                stdin=self._streams[0],
                stdout=self._streams[1],
                stderr=self._streams[2],
                preexec_fn=self._in_the_child(message["group"]),  # noqa: PLW1509 - there are no threads here
            )
        except OSError as error:
            self._say({"event": "failed", "errno": error.errno, "why": error.strerror, "what": error.filename})
            self._is_line_open = False
            return
        self._command = started.pid
        started.returncode = 0  # it is waited for below, with all the others, and not by this object
        for descriptor in self._streams:
            os.close(descriptor)
        self._streams = [-1]
        self._say({"event": "started", "pid": started.pid})

    def _in_the_child(self, group: int) -> Callable[[], None]:
        guard = os.getpid()

        def prepare() -> None:
            os.setpgid(0, group)
            for number, before in self._inherited.items():
                # What was ignored before us (by nohup, say) stays so.
                signal.signal(number, signal.SIG_IGN if before is signal.SIG_IGN else signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(1)  # it died before we were bound to it

        return prepare

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._command:
                    self._status = status
                    self._end(self._orphan_grace_s)

    def _end(self, grace_s: float) -> None:
        """Ask all to end, and kill what has not after this long."""
        self._signal_all(signal.SIGTERM)
        self._signal_all(signal.SIGCONT)  # one that is stopped would not hear it
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)

    def _signal_all(self, number: int) -> None:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(frame(message))


def _parents() -> Iterator[tuple[int, int]]:
    """All processes with their parents."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - quick, and no package is loaded here
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - the same
                    # The name of the program stands in brackets and may have anything in it.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue  # it has just ended, or is none of ours to see
            if state != b"Z":
                yield int(name), int(parent)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    Guard(socket.socket(fileno=int(sys.argv[1]))).run()
