"""The guard of detached_guard.py, until submitted jobs use guard.py: the process that holds the lease.

While the guard lives, the GPU is granted to no other holder, and the guard ends only when no process of the command is
left. So nothing of the command outlives its lease, whichever process is killed, also with -9:

- gpu-pool dies: the guard sees the line to it close, and ends the command and all its descendants.
- gpu-pool is stopped or hangs, and sends no more heartbeats: the guard knows until when the lease is safe, and ends the
  command then.
- the lease ends at a time that is known before: the guard sends SIGTERM ahead of it, and kills the command then.
- the guard dies: the kernel kills the command (parent-death signal). Processes that the command had started become
  children of gpu-pool, which kills them.

Processes that the command leaves behind when it ends are ended too: they would use a GPU that is no longer theirs.

The guard is run as a program, without the package and without site-packages, so that it starts at once and stays small.
The messages on the line are JSON, each with its length before it. The first one brings the standard streams of the
command.
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
# A stopped process acts on these only after SIGCONT.
_ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
# Signals that a terminal sends, or a user to the whole process group. gpu-pool and the command act on them; the guard
# ignores them.
_IGNORED: Final = _ENDING | {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1, signal.SIGUSR2}
# How soon processes that are still there are killed again. A process may have forked in between, and may do nothing
# else, so the first rounds follow each other quickly. What is still there after them is stuck in the kernel.
_KILL_AGAIN_S: Final = 0.001
_KILL_SELDOM_S: Final = 0.1
_QUICK_ROUNDS: Final = 1000
# One round in this many signals all descendants; the others signal our children only, which is quicker.
_SCAN_EVERY: Final = 20
LENGTH: Final = struct.Struct("!I")
# How long a guard whose command has ended waits for the release of the lease.
_RELEASE_S: Final = 2.0


def become_subreaper() -> None:
    """Make orphans among our descendants our children, instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent is gone, even by kill -9; not possible except on Linux."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before this process was bound to it


def descendants(of: int) -> list[int]:
    """All descendants of a process, without the process itself."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    unvisited = [of]
    while unvisited:
        below = children.get(unvisited.pop(), [])
        found += below
        unvisited += below
    return found


def frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def unframe(buffer: bytearray) -> Iterator[dict[str, Any]]:
    """Take the complete messages out of the buffer; the rest stays in it."""
    while len(buffer) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(buffer)
        if len(buffer) < LENGTH.size + length:
            return
        body = bytes(buffer[LENGTH.size : LENGTH.size + length])
        del buffer[: LENGTH.size + length]
        yield json.loads(body)


class Guard:
    """Guards one command, from before its start until none of its processes is left."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._buffer = bytearray()
        self._streams: list[int] = []
        self._command: int | None = None
        self._status: int | None = None
        self._grace_s = 0.0
        self._safe_until: float | None = None
        self._was_late = False
        self._limit: float | None = None
        self._limit_grace_s = 0.0
        self._was_limited = False
        self._warned_of: str | None = None
        self._kill_at: float | None = None
        self._kills = 0
        self._is_line_open = True
        self._has_children = False
        self._inherited = {number: signal.getsignal(number) for number in _IGNORED}

    def run(self) -> None:
        """Run until the command is gone; where none was started, until the line closes."""
        become_subreaper()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while not self._is_over():
            ready, _, _ = select.select([wake, *self._sources()], [], [], self._until_next_deadline_s())
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            self._take_in(ready)
            if self._safe_until is not None and boot_time() >= self._safe_until:
                self._safe_until = None
                self._was_late = True
                self._end(self._grace_s)
            if self._limit is not None and boot_time() >= self._limit - self._limit_grace_s:
                # The GPU is granted again at the limit, so the time to end is before it.
                left_s, self._limit = self._limit - boot_time(), None
                self._was_limited = self._status is None
                self._end(max(left_s, 0.0))
            if self._kill_at is not None and boot_time() >= self._kill_at:
                self._kill_all()
        if self._status is not None:
            self._send({"event": "ended", **self._outcome()})
            self._stay_for_release()

    def _stay_for_release(self) -> None:
        """Live until the lease is released and the line closed. If the holder died first, the lease would look lost."""
        deadline = boot_time() + _RELEASE_S
        while self._is_line_open and select.select([self._line], [], [], max(deadline - boot_time(), 0.0))[0]:
            with contextlib.suppress(OSError):
                if self._line.recv(65536):
                    continue
            return

    def _outcome(self) -> dict[str, Any]:
        ends = {"was_late": self._was_late, "was_limited": self._was_limited, "warned_of": self._warned_of}
        return {"status": self._status, **ends}

    def _sources(self) -> list[int]:
        """The descriptors to read from."""
        return [self._line.fileno()] if self._is_line_open else []

    def _take_in(self, ready: list[int]) -> None:
        if self._is_line_open and self._line.fileno() in ready:
            self._receive()

    def _lose_line(self) -> None:
        self._is_line_open = False
        self._end(self._grace_s)

    def _is_over(self) -> bool:
        if self._command is None:
            return not self._is_line_open
        # Every process of the command descends from a child of ours, because orphans become our children.
        return self._status is not None and not self._has_children

    def _until_next_deadline_s(self) -> float | None:
        told_at = None if self._limit is None else self._limit - self._limit_grace_s
        deadlines = [at for at in (self._kill_at, self._safe_until, told_at) if at is not None]
        return max(min(deadlines) - boot_time(), 0.0) if deadlines else None

    def _receive(self) -> None:
        try:
            if self._streams:
                data = self._line.recv(65536)
            else:
                data, self._streams, _, _ = socket.recv_fds(self._line, 65536, 3)
        except OSError:
            data = b""
        if not data:
            self._lose_line()
            return
        self._buffer += data
        for message in unframe(self._buffer):
            self._obey(message)

    def _obey(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "start":
                self._start(message)
            case "safe":
                self._safe_until = message["until"] if self._kill_at is None else None
            case "limit":
                self._limit, self._limit_grace_s = message["at"], message["grace_s"]
                self._warned_of = message.get("warned_of")
            case "signal":
                self._signal_all(message["number"])
            case "end":
                self._end(message["grace_s"])

    def _start(self, message: dict[str, Any]) -> None:
        self._grace_s = message["grace_s"]
        self._safe_until = message["safe_until"]
        self._limit, self._limit_grace_s = message["limit"], message["limit_grace_s"]
        try:
            started = subprocess.Popen(  # noqa: S603 - the user's command is what this is for
                message["command"],
                env=message["env"],
                stdin=self._streams[0],
                stdout=self._streams[1],
                stderr=self._streams[2],
                cwd=message.get("cwd"),
                umask=message.get("umask", -1),
                preexec_fn=self._child_setup(message["group"]),  # noqa: PLW1509 - there are no threads here
            )
        except (OSError, ValueError) as error:  # a ValueError is a NUL in a word, which no program can be given
            number, why = (error.errno, error.strerror) if isinstance(error, OSError) else (None, str(error))
            self._send({"event": "failed", "errno": number, "why": why})
            self._is_line_open = False
            return
        self._command = started.pid
        self._has_children = True
        started.returncode = 0  # `_reap` waits for it, as for every other child, and not this object
        for descriptor in self._streams:
            os.close(descriptor)
        self._streams = [-1]
        self._send({"event": "started"})

    def _child_setup(self, group: int) -> Callable[[], None]:
        guard = os.getpid()

        def prepare() -> None:
            os.setpgid(0, group)
            for number, before in self._inherited.items():
                # What was ignored before us (by nohup, say) stays ignored.
                signal.signal(number, signal.SIG_IGN if before is signal.SIG_IGN else signal.SIG_DFL)
            die_with(guard)

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
        """Send SIGTERM to all processes of the command, and kill after `grace_s` what is still there."""
        self._signal_all(signal.SIGTERM)
        kill_at = boot_time() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)

    def _kill_all(self) -> None:
        children = _children()
        for pid in children:
            _kill(pid, signal.SIGKILL)
        if self._kills % _SCAN_EVERY == 0 or not children:
            self._signal_all(signal.SIGKILL)
        self._reap()
        self._kills += 1
        self._kill_at = boot_time() + (_KILL_AGAIN_S if self._kills < _QUICK_ROUNDS else _KILL_SELDOM_S)

    def _signal_all(self, number: int) -> None:
        for one in (number, signal.SIGCONT) if number in _ENDING else (number,):
            for pid in descendants(os.getpid()):
                _kill(pid, one)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(frame(message))


def boot_time() -> float:
    """The clock of leases, as in host/clock.py."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def can_see_processes() -> bool:
    """Whether /proc shows this process, by the numbers of its own pid namespace or of one around it."""
    return _own_depth() is not None


def _own_depth() -> int | None:
    """How many namespaces are between that of /proc and ours: 0 where /proc is ours, None where it shows no such thing.

    A container may have the /proc of the machine. Every number there means another process than it does to us.
    """
    try:
        if os.readlink("/proc/self") == str(os.getpid()):  # noqa: PTH115 - no package is loaded here
            return 0
        numbers = _facts("self")[0]
    except (OSError, ValueError, IndexError):
        return None
    return len(numbers) - 1 if numbers[-1] == os.getpid() else None


def _facts(name: str) -> tuple[list[int], int]:
    """A process's numbers, from the namespace of /proc inwards, and the number of its parent there."""
    with open(f"/proc/{name}/status", "rb") as file:  # noqa: PTH123 - no package is loaded here
        lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    return [int(number) for number in lines[b"NSpid"].split()], int(lines[b"PPid"])


def _children() -> list[int]:
    """The children of this process, as the kernel lists them; none where it has no such list: the scan must do."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123 - see below
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _parents() -> Iterator[tuple[int, int]]:
    depth = _own_depth()
    return _parents_inside(depth) if depth else _parents_here()


def _parents_inside(depth: int) -> Iterator[tuple[int, int]]:
    """As `_parents_here`, where /proc has the numbers of a namespace around ours."""
    facts = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - see below
        if name.isdigit():
            with contextlib.suppress(OSError, KeyError, ValueError):
                facts[int(name)] = _facts(name)
    inside = {outer: numbers[depth] for outer, (numbers, _) in facts.items() if len(numbers) > depth}
    for outer, number in inside.items():
        parent = inside.get(facts[outer][1])
        if parent is not None:
            yield number, parent


def _parents_here() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):  # noqa: PTH208 - quick, and no package is loaded here
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - the same
                    # The name of the program stands in brackets and may have anything in it.
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue  # it has just ended, or we may not see it
            # Also a process that is dead by its state: its other threads may live.
            yield int(name), parent


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    Guard(socket.socket(fileno=int(sys.argv[1]))).run()
