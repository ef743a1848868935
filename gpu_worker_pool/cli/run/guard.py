"""Stands between `gpu-pool` and the command it runs, and outlives neither by choice.

It is the process that holds the lease: while it lives, the GPU is not given to anybody else, and it ends only when
nothing of the command is left. So whoever is killed, and with -9 too:

- gpu-pool dies: the guard sees its end of the line close, and ends the command, with all that descends from it.
- gpu-pool is stopped or hangs, so that the lease is renewed no more: the guard was told until when it is safe, and ends the
  command then.
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
# How often what does not go is killed again: it may have forked in between, and may do nothing else. So at first as quickly
# as can be; what is still there after that is stuck in the kernel.
_KILL_AGAIN_S: Final = 0.001
_KILL_SELDOM_S: Final = 0.1
_KILL_OFTEN: Final = 1000
# A program that is stopped does not act on these until it goes on.
_ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
# Of so many rounds of killing, how many look at all processes instead of at our children.
_SCAN_EVERY: Final = 20
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
        self._grace_s = 0.0
        self._safe_until: float | None = None
        self._was_late = False
        self._kill_at: float | None = None
        self._kills = 0
        self._is_line_open = True
        self._has_children = False
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
            if self._safe_until is not None and boot_time() >= self._safe_until:
                self._safe_until = None
                self._was_late = True
                self._end(self._grace_s)
            if self._kill_at is not None and boot_time() >= self._kill_at:
                self._kill_all()
        if self._status is not None:
            self._say({"event": "ended", "status": self._status, "was_late": self._was_late})

    def _is_over(self) -> bool:
        if self._command is None:
            return not self._is_line_open
        # What is left of it, however deep, descends from a child of ours, because orphans become our children.
        return self._status is not None and not self._has_children

    def _nap_s(self) -> float | None:
        alarms = [at for at in (self._kill_at, self._safe_until) if at is not None]
        return max(min(alarms) - boot_time(), 0.0) if alarms else None

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
            self._end(self._grace_s)
            return
        self._buffer += data
        for message in unframe(self._buffer):
            match message["do"]:
                case "start":
                    self._start(message)
                case "safe":
                    self._safe_until = message["until"] if self._kill_at is None else None
                case "signal":
                    self._signal_all(message["number"])
                    if message["number"] in _ENDING:
                        self._signal_all(signal.SIGCONT)
                case "end":
                    self._end(message["grace_s"])

    def _start(self, message: dict[str, Any]) -> None:
        self._grace_s = message["grace_s"]
        self._safe_until = message["safe_until"]
        try:
            started = subprocess.Popen(  # noqa: S603 - the user's command is what this is for
                message["command"],
                env=message["env"],
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
        self._has_children = True
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
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._has_children = False
                return
            if pid == 0:
                return
            if pid == self._command:
                self._status = status
                self._end(self._grace_s)

    def _end(self, grace_s: float) -> None:
        """Ask all to end, and kill what has not after this long."""
        self._signal_all(signal.SIGTERM)
        self._signal_all(signal.SIGCONT)  # one that is stopped would not hear it
        kill_at = boot_time() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)

    def _kill_all(self) -> None:
        for pid in _children():
            _send(pid, signal.SIGKILL)
        if self._kills % _SCAN_EVERY == 0:
            self._signal_all(signal.SIGKILL)
        self._reap()
        self._kills += 1
        self._kill_at = boot_time() + (_KILL_AGAIN_S if self._kills < _KILL_OFTEN else _KILL_SELDOM_S)

    def _signal_all(self, number: int) -> None:
        for pid in descendants(os.getpid()):
            _send(pid, number)

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(frame(message))


def boot_time() -> float:
    """As in ledger/clock.py: the clock that leases run on."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _children() -> list[int]:
    """Those of this process, quickly; where the kernel does not tell, none, and the slow way must do."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123 - the same
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _parents() -> Iterator[tuple[int, int]]:
    """All processes with their parents."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - quick, and no package is loaded here
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - the same
                    # The name of the program stands in brackets and may have anything in it.
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue  # it has just ended, or is none of ours to see
            # Also one that is dead by its state: its other threads may live.
            yield int(name), parent


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    Guard(socket.socket(fileno=int(sys.argv[1]))).run()
