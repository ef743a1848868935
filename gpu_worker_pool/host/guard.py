"""The guard: the process between `gpu-pool` and its commands, which holds the lease.

While the guard lives, the GPU is granted to no other holder, and the guard ends only when no process of a command is
left. So nothing of a command outlives its lease, whichever process is killed, also with -9. The supervisor is the process
at the other end of the guard's line (host/guarded.py):

- the supervisor dies: the guard sees the line close, and ends the command and all its descendants.
- the supervisor is stopped or hangs, and sends no more heartbeats: the guard knows until when the lease is safe, and ends
  the command then.
- the lease ends at a time that is known before: the guard sends SIGTERM ahead of it, and kills the command then.
- the guard dies: the kernel kills the command (parent-death signal), and the supervisor kills what the command had started.

Processes that a command leaves behind when it ends are ended too: they would use a GPU that is no longer theirs. A guard
may run several commands one after the other. It ends when the line is closed and nothing is left.

The guard is run as a program, without the package and without site-packages, so that it starts at once and stays small:

    guard.py DESCRIPTOR                       its supervisor has started it, and DESCRIPTOR is the line
    guard.py --supervise PROGRAM [ARG]...     it starts its supervisor, whose standard input is the line, and which gets
                                              the signals that are to end the guard

The messages on the line are JSON, one in each line. Each `start` brings the standard streams of its command.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
# A stopped process acts on these only after SIGCONT.
_ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
# Signals that a terminal sends, or a user to the whole process group. The supervisor and the command act on them, and the
# guard does not.
_PASSED_OVER: Final = _ENDING | {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1, signal.SIGUSR2}
# How soon processes that are still there are killed again. A process may have forked in between, and may do nothing
# else, so the first rounds follow each other quickly. What is still there after them is stuck in the kernel.
_KILL_AGAIN_S: Final = 0.001
_KILL_SELDOM_S: Final = 0.1
_QUICK_ROUNDS: Final = 1000
# One round in this many signals all descendants; the others signal our children only, which is quicker.
_SCAN_EVERY: Final = 20
_STREAMS: Final = 3


def become_subreaper() -> None:
    """Make orphans among our descendants our children, instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent is gone, even by kill -9; not possible except on Linux."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before this process was bound to it


def descendants(of: int, without: int | None = None) -> dict[int, int]:
    """All descendants of a process and their parents; not those `without` and below."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        if pid != without:
            children.setdefault(parent, []).append(pid)
    found: dict[int, int] = {}
    unvisited = [of]
    while unvisited:
        parent = unvisited.pop()
        below = children.get(parent, [])
        found |= dict.fromkeys(below, parent)
        unvisited += below
    return found


def frame(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def unframe(buffer: bytearray) -> Iterator[dict[str, Any]]:
    """Take the complete messages out of the buffer; the rest stays in it."""
    while (end := buffer.find(b"\n")) >= 0:
        body = bytes(buffer[:end])
        del buffer[: end + 1]
        yield json.loads(body)


class _RunningCommand:
    """One command, from its start until none of its processes is left; `start` is the message that started it."""

    def __init__(self, pid: int, start: Mapping[str, Any]) -> None:
        self.pid = pid
        self.status: int | None = None
        self.grace_s: float = start["grace_s"]
        self.safe_until: float | None = start["safe_until"]
        self.was_late = False
        self.limit: float | None = start["limit"]
        self.limit_grace_s: float = start["limit_grace_s"]
        self.was_limited = False
        self.warned_of: str | None = None
        self.kill_at: float | None = None
        self.kills = 0

    @property
    def told_at(self) -> float | None:
        """When it gets SIGTERM: the GPU is granted again at the limit, so the time to end is before it."""
        return None if self.limit is None else self.limit - self.limit_grace_s

    def deadlines(self) -> list[float]:
        return [at for at in (self.kill_at, self.safe_until, self.told_at) if at is not None]

    def ended(self) -> dict[str, Any]:
        ends = {"was_late": self.was_late, "was_limited": self.was_limited, "warned_of": self.warned_of}
        return {"event": "ended", "status": self.status, **ends}


class Guard:
    """Guards the commands that its supervisor sends. `supervisor` is its pid where it is a child of this process: it and
    what it starts are not parts of a command.
    """

    def __init__(self, line: socket.socket, supervisor: int | None = None) -> None:
        self._line = line
        self._supervisor = supervisor
        self._buffer = bytearray()
        self._streams: list[int] = []
        self._run: _RunningCommand | None = None
        self._has_children = False
        self._is_line_open = True
        self._ready = select.poll()

    def run(self) -> None:
        """Run until the line is closed and nothing of a command is left."""
        become_subreaper()
        wake = _pass_over_signals()
        self._ready.register(wake, select.POLLIN)
        self._ready.register(self._line, select.POLLIN)
        while self._is_line_open or self._run is not None:
            ready = {descriptor for descriptor, _ in self._ready.poll(self._until_next_deadline_ms())}
            if wake in ready:
                self._pass_on(os.read(wake, 4096))
                self._reap()
            if self._is_line_open and self._line.fileno() in ready:
                self._receive()
            if self._run is not None:
                self._keep_times(self._run)
            if self._run is not None and self._run.status is not None and not self._has_children:
                # Every process of the command descended from a child of ours, because orphans become our children.
                self._send(self._run.ended())
                self._run = None

    def _pass_on(self, numbers: bytes) -> None:
        """Pass signals to a supervisor that is a child: the pid that people see is that of the guard."""
        for number in numbers:
            if self._supervisor is not None and number in _ENDING:
                os.kill(self._supervisor, number)

    def _keep_times(self, run: _RunningCommand) -> None:
        now = boot_time()
        if run.safe_until is not None and now >= run.safe_until:
            run.safe_until = None
            run.was_late = True
            self._end(run, run.grace_s)
        if run.limit is not None and run.told_at is not None and now >= run.told_at:
            left_s, run.limit = run.limit - now, None
            run.was_limited = run.status is None
            self._end(run, max(left_s, 0.0))
        if run.kill_at is not None and boot_time() >= run.kill_at:
            self._kill_all(run)

    def _until_next_deadline_ms(self) -> float | None:
        deadlines = [] if self._run is None else self._run.deadlines()
        return max(min(deadlines) - boot_time(), 0.0) * 1000 if deadlines else None

    def _receive(self) -> None:
        try:
            data, streams, _, _ = socket.recv_fds(self._line, 65536, _STREAMS)
        except OSError:
            data, streams = b"", []
        self._streams += streams
        self._buffer += data
        if not data:
            self._is_line_open = False
            self._ready.unregister(self._line)
            if self._run is not None:
                self._end(self._run, self._run.grace_s)
        for message in unframe(self._buffer):
            if message["do"] == "start":
                self._start(message)
            elif self._run is not None:
                self._obey(self._run, message)

    def _obey(self, run: _RunningCommand, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "safe":
                run.safe_until = message["until"] if run.kill_at is None else None
            case "limit":
                run.limit, run.limit_grace_s = message["at"], message["grace_s"]
                run.warned_of = message.get("warned_of")
            case "signal":
                self._signal_all(message["number"])
            case "end":
                self._end(run, message["grace_s"])

    def _start(self, message: Mapping[str, Any]) -> None:
        streams, self._streams = self._streams[:_STREAMS], self._streams[_STREAMS:]
        guard = os.getpid()
        try:
            started = subprocess.Popen(  # noqa: S603 - the user's command is what this is for
                message["command"],
                env=message["env"],
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                cwd=message.get("cwd"),
                umask=message.get("umask", -1),
                process_group=message["group"],
                preexec_fn=lambda: die_with(guard),  # noqa: PLW1509 - there are no threads here
            )
        except (OSError, ValueError) as error:  # a ValueError is a NUL in a word, which no program can be given
            number, why = (error.errno, error.strerror) if isinstance(error, OSError) else (None, str(error))
            self._send({"event": "failed", "errno": number, "why": why})
        else:
            started.returncode = 0  # `_reap` waits for it, as for every other child, and not this object
            self._run, self._has_children = _RunningCommand(started.pid, message), True
            self._send({"event": "started", "pid": started.pid})
        for descriptor in streams:
            os.close(descriptor)

    def _reap(self) -> None:
        """Wait for the children that have ended, and see whether others are left."""
        has_run_ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._has_children = False
                break
            if pid == 0:
                self._has_children = self._supervisor is None or any(child != self._supervisor for child in _children())
                break
            if pid == self._supervisor:
                self._supervisor = None
            elif self._run is not None and pid == self._run.pid:
                self._run.status, has_run_ended = status, True
        if has_run_ended and self._has_children and self._run is not None:
            self._end(self._run, self._run.grace_s)

    def _end(self, run: _RunningCommand, grace_s: float) -> None:
        """Send SIGTERM to all processes of the command, and kill after `grace_s` what is still there."""
        self._signal_all(signal.SIGTERM)
        kill_at = boot_time() + grace_s
        run.kill_at = kill_at if run.kill_at is None else min(kill_at, run.kill_at)

    def _kill_all(self, run: _RunningCommand) -> None:
        children = [pid for pid in _children() if pid != self._supervisor]
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # the number of a child is not given to another before we wait for it
        if run.kills % _SCAN_EVERY == 0 or not children:
            self._signal_all(signal.SIGKILL)
        self._reap()
        run.kills += 1
        run.kill_at = boot_time() + (_KILL_AGAIN_S if run.kills < _QUICK_ROUNDS else _KILL_SELDOM_S)

    def _signal_all(self, number: int) -> None:
        for pid, parent in descendants(os.getpid(), without=self._supervisor).items():
            # Not to one that runs: SIGCONT would wake another thread of it, which may take SIGTERM as well. Then a main thread
            # of Python that sleeps does not notice that there is a signal to handle.
            numbers = (number, signal.SIGCONT) if number in _ENDING and _is_stopped(pid) else (number,)
            # By now its parent may have ended, and it is our child.
            send_signals(pid, numbers, lambda pid=pid, parent=parent: _parent_of(pid) in {parent, os.getpid()})  # type: ignore[misc]

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(frame(message))


def _pass_over_signals() -> int:
    """Do nothing on signals that are not for the guard; a descriptor that can be read when one has come, or a child ended.

    With a handler and not ignored: a command starts without it, and still ignores what was ignored before us (by nohup).
    """
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (*_PASSED_OVER, signal.SIGCHLD):
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    # Only now: one that had been blocked, and has come, would end us.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    return wake


def boot_time() -> float:
    """The clock of leases, as in host/clock.py."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def send_signals(pid: int, numbers: Sequence[int], is_meant: Callable[[], bool]) -> bool:
    """Send these to a process if it `is_meant`, and never to another one that has its number by now; whether it was."""
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            return False  # it has ended
        process = None  # an old kernel
    try:
        if not is_meant():
            return False
        for number in numbers:
            if process is None:
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(process, number)
    except OSError:
        return False  # it has just ended, or belongs to another user
    finally:
        if process is not None:
            os.close(process)
    return True


def processes() -> list[int]:
    """The numbers of all processes that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - no package is loaded here


def _parents() -> Iterator[tuple[int, int]]:
    """Each process and its parent, also one that is dead by its state: its other threads may live."""
    for pid in processes():
        with contextlib.suppress(OSError):  # it has just ended, or we may not see it
            yield pid, _parent_of(pid)


def _parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def _is_stopped(pid: int) -> bool:
    try:
        return _stat(pid)[0] == b"T"
    except OSError:
        return False  # it has just ended


def _stat(pid: int) -> list[bytes]:
    """What the kernel says of a process, from its state on."""
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - no package is loaded here
        # The name of the program stands in brackets and may have anything in it.
        return file.read().rpartition(b")")[2].split()


def _children() -> list[int]:
    """The children of this process, as the kernel lists them; by a scan where it has no such list."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:  # noqa: PTH123 - no package is loaded here
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return [pid for pid, parent in _parents() if parent == os.getpid()]


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _main(arguments: Sequence[str]) -> None:
    if arguments[0] != "--supervise":
        Guard(socket.socket(fileno=int(arguments[0]))).run()
        return
    line, theirs = socket.socketpair()
    with theirs:
        supervisor = subprocess.Popen(arguments[1:], stdin=theirs.fileno(), process_group=0)  # noqa: S603 - our own program
    supervisor.returncode = 0  # the guard waits for it
    Guard(line, supervisor.pid).run()


if __name__ == "__main__":
    _main(sys.argv[1:])
