"""A guard as its supervisor sees it (host/guard.py says what a guard does): one line, one framing, for all users."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, Self

from gpu_worker_pool.failure import CANNOT_RUN, NOT_FOUND, SIGNAL_BASE, Failure

from . import guard
from .connections import unix_peer
from .processes import own_proc

# In the environment of all that a guard runs: the marks of this guard and of those around it, with colons between them. When
# a guard was killed, its supervisor finds by it what is left.
GUARD_VARIABLE: Final = "GPU_POOL_GUARD"
_ADVICE: Final = {
    errno.ENOENT: "the program that its first line names does not exist; correct that line",
    errno.EACCES: "it is not executable; use chmod +x, or name the program that runs it (python …)",
    errno.EISDIR: "it is a directory; name the program in it",
    errno.ENOEXEC: "it is not a program; give it a first line such as #!/bin/sh, or name the program that runs it",
}
_NO_PROC: Final = (
    "/proc does not show this process by its own number, so what the command starts could not be ended with it; mount the "
    "/proc of this container (mount -t proc proc /proc, or unshare --mount-proc)"
)
# How soon what a killed guard left is killed again: it may have forked in between. What is there after all that time is stuck
# in the kernel, and the server waits for its end before it grants the GPU again.
_KILL_AGAIN_S: Final = 0.005
_MOST_KILLING_S: Final = 10.0
# A command gets SIGTERM at most this part of its time before its limit.
_GRACE_PARTS: Final = 10
_MARKS: Final = f"\0{GUARD_VARIABLE}=".encode()


class GuardDied(Failure):
    """The guard was killed. What it guarded is dead by then."""

    def __init__(self) -> None:
        super().__init__("the guard of the command was killed, and the command with it")


class Ended(NamedTuple):
    """The end of a command: the exit code as in a shell, and why the guard ended it, if it did."""

    exit_code: int
    # No update said in time that the lease is safe.
    was_late: bool
    # Its limit had come.
    was_limited: bool
    # Why the lease was to end, where the command had been warned: `preempted`, say.
    warned_of: str | None
    # As wait(2) has it.
    status: int


class Guarded:
    """A guard, and the commands that it runs one after the other.

    It is made before the GPU is requested, because `pid`, the guard, is the holder of the lease. Used in one event loop.
    Every message arrives, also at a guard that is stopped for a while.
    """

    def __init__(
        self,
        line: socket.socket,
        pid: int,
        process: subprocess.Popen[bytes] | None = None,
        grace_parts: int = _GRACE_PARTS,
    ) -> None:
        line.setblocking(False)  # noqa: FBT003 - its only parameter
        self.pid = pid
        self._line = line
        self._process = process
        self._grace_parts = grace_parts
        self._mark = f"{pid}-{secrets.token_hex(8)}"
        self._buffer = bytearray()
        # What the line has not taken yet: messages, and the descriptors that go with each.
        self._unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        self._safe_until: float | None = None

    @classmethod
    def start(cls, keeps_open: Sequence[int] = (), grace_parts: int = _GRACE_PARTS) -> Self:
        """Start a guard. `keeps_open`: descriptors that stay open for as long as the guard lives, and are not the
        command's. A command gets SIGTERM at most one of `grace_parts` of its time before its limit. Failure where /proc does
        not show what a command starts.
        """
        check_proc()
        line, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(  # noqa: S603 - our own program
                [*guard_program(), str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *keeps_open],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # In a group of its own, so that a signal to our group does not end both of us at once.
                process_group=0,
            )
        except BaseException:
            line.close()
            raise
        finally:
            theirs.close()
        return cls(line, process.pid, process, grace_parts)

    @classmethod
    def inherited(cls) -> Self:
        """The guard that has started this process (`guard.py --supervise`). Standard input becomes empty."""
        line = socket.socket(fileno=os.dup(0))
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - as quick as possible
            os.dup2(nothing.fileno(), 0)
        pid, _ = unix_peer(line)
        return cls(line, pid)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        streams: tuple[int, int, int] = (0, 1, 2),
        *,
        cwd: str | None = None,
        umask: int = -1,
        group: int = 0,
        grace_s: float,
        safe_until: float | None = None,
        limit: float | None = None,
        limit_grace_s: float | None = None,
    ) -> None:
        """Start the command with these standard streams, in this process group (0: one of its own).

        `grace_s` is the time between SIGTERM and SIGKILL if this process dies, or if the command leaves processes
        behind. `safe_until` and `limit` are as in `tell_safe_until` and `tell_limit`. Failure with 126 or 127 where the
        command cannot be run; GuardDied.
        """
        self._safe_until = safe_until
        limit_grace_s = grace_s if limit_grace_s is None else limit_grace_s
        marks = f"{env[GUARD_VARIABLE]}:{self._mark}" if env.get(GUARD_VARIABLE) else self._mark
        what = {"command": list(command), "env": {**env, GUARD_VARIABLE: marks}, "cwd": cwd, "umask": umask}
        limits = {"safe_until": safe_until, "limit": limit, "limit_grace_s": self._grace_before(limit, limit_grace_s)}
        self._send({"do": "start", **what, **limits, "group": group, "grace_s": grace_s}, streams)
        answer = await self._receive()
        if answer["event"] == "failed":
            raise _cannot_run(command[0], answer["errno"], answer["why"])

    async def wait(self) -> Ended:
        """Wait until no process of the command is left. GuardDied where it is not known how it ended."""
        answer = await self._receive()
        code = exit_code(answer["status"])
        return Ended(code, answer["was_late"], answer["was_limited"], answer["warned_of"], answer["status"])

    def tell_safe_until(self, at: float) -> None:
        """Tell the guard when to end the command, on the clock of leases, unless it is told a later time."""
        if at == self._safe_until:
            return
        self._safe_until = at
        self._send({"do": "safe", "until": at})

    def tell_limit(self, at: float | None, grace_s: float, warned_of: str | None = None) -> None:
        """Tell the guard when the lease ends, on the clock of leases: it kills the command then, and sends SIGTERM
        `grace_s` before, or its part of the time until then where that is less. `warned_of`: the reason, where the command
        is warned; None: it is the time limit, or a warning is withdrawn.
        """
        self._send({"do": "limit", "at": at, "grace_s": self._grace_before(at, grace_s), "warned_of": warned_of})

    def send_signal(self, number: int) -> None:
        """Send a signal to every process of the command."""
        self._send({"do": "signal", "number": number})

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to every process of the command, and SIGKILL after `grace_s`. `wait` tells the end."""
        self._send({"do": "end", "grace_s": grace_s})

    async def close(self) -> None:
        """End the guard, and with it what may be left of a command; returns when both are gone. Harmless if repeated."""
        self._hang_up()
        if self._process is not None and self._process.poll() is None:
            await _wait_for_exit(self._process)

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        self._unsent.append((guard.frame(message), descriptors))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                data, descriptors = self._unsent[0]
                sent = socket.send_fds(self._line, [data], descriptors) if descriptors else self._line.send(data)
                if sent < len(data):
                    self._unsent[0] = (data[sent:], ())
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            loop.add_writer(self._line, self._flush)
            return
        except OSError:
            self._unsent.clear()  # the guard has ended, or was killed: `wait` reports it
        if self._line.fileno() >= 0:
            loop.remove_writer(self._line)

    async def _receive(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        while True:
            for message in guard.unframe(self._buffer):
                return message
            try:
                data = await loop.sock_recv(self._line, 65536)
            except OSError:
                data = b""
            if not data:
                self._hang_up()
                # Not in the loop: it reads all of /proc.
                await asyncio.to_thread(_kill_marked, self._mark.encode())
                raise GuardDied
            self._buffer += data

    def _grace_before(self, limit: float | None, grace_s: float) -> float:
        return grace_s if limit is None else min(grace_s, max(limit - guard.boot_time(), 0.0) / self._grace_parts)

    def forget(self) -> None:
        """Close the line in a forked process, in which the guard is that of the parent."""
        self._line.close()

    def _hang_up(self) -> None:
        if self._line.fileno() < 0:
            return
        asyncio.get_running_loop().remove_writer(self._line)
        self._unsent.clear()
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # a forked child of ours may have it open too
        self._line.close()


def guard_program() -> list[str]:
    """The guard as a program; see host/guard.py for its arguments. Nothing of the user's environment, and no packages."""
    return [sys.executable, "-I", "-S", guard.__file__]


async def _wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        await asyncio.to_thread(process.wait)
        return
    loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()  # at once


def _kill_marked(mark: bytes) -> None:
    """Kill all processes of this user with this mark in their environment, until none is left."""

    give_up_at = time.monotonic() + _MOST_KILLING_S
    while time.monotonic() < give_up_at:
        killed = [pid for pid in guard.processes() if pid != os.getpid() and _kill_if_marked(pid, mark)]
        if not killed:
            return
        time.sleep(_KILL_AGAIN_S)


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    def is_marked() -> bool:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - quick
            marks = (b"\0" + file.read()).partition(_MARKS)[2].partition(b"\0")[0]
        return mark in marks.split(b":")

    return guard.send_signals(pid, [signal.SIGKILL], is_marked)


def exit_code(status: int) -> int:
    """A status of wait(2) as an exit code of a shell."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else SIGNAL_BASE - code


def check_proc() -> None:
    """Raise Failure where what a command starts could not be seen, and so not be ended with it."""
    if own_proc() is None:
        raise Failure(_NO_PROC)


def check_can_run(program: str, environ: Mapping[str, str]) -> None:
    """Raise Failure with 126 or 127 where the program cannot be run: better now than after a night in the queue."""
    if shutil.which(program, path=environ.get("PATH", os.defpath)) is not None:
        return
    # Path.exists would raise where this user may not look.
    if "/" in program and os.path.exists(program):  # noqa: PTH110
        raise _cannot_run(program, errno.EISDIR if os.path.isdir(program) else errno.EACCES, "")  # noqa: PTH112
    raise Failure(f"{program}: no such program; check the name and PATH", NOT_FOUND)


def _cannot_run(program: str, number: int | None, why: str) -> Failure:
    return Failure(f"{program} cannot be run: {_ADVICE.get(number or 0, why)}", CANNOT_RUN)


@contextmanager
def given_input(data: bytes) -> Iterator[int]:
    """A descriptor from which a program reads this."""
    descriptor = os.memfd_create("input")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
