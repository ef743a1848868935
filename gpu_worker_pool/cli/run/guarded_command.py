"""A command and its guard, as `gpu-pool` sees them; host/guard.py says what a guard does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from gpu_worker_pool.cli.failure import CANNOT_RUN, NOT_FOUND, SIGNAL_BASE, Failure
from gpu_worker_pool.host import guard

_ADVICE = {
    errno.ENOENT: "the program that its first line names does not exist; correct that line",
    errno.EACCES: "it is not executable; use chmod +x, or name the program that runs it (python …)",
    errno.ENOEXEC: "it is not a program; give it a first line such as #!/bin/sh, or name the program that runs it",
}
_NO_PROC = (
    "/proc does not show this process, so what the command starts could not be ended with it; mount the /proc of this "
    "container (mount -t proc proc /proc, or unshare --mount-proc)"
)
# How soon processes that are still there are killed again: they may have forked in between.
_KILL_AGAIN_S = 0.01
# A command gets SIGTERM at most this part of its time before its limit.
_GRACE_PARTS = 10


class GuardDied(Exception):  # noqa: N818 - what happened
    """The guard was killed. What it guarded is dead by then."""


class GuardLine:
    """The line to a guard: what it is told, and what it says. `close` is called when the guard is gone."""

    # The guards that live. Any other descendant of ours was left by a guard that was killed.
    _guards: ClassVar[set[int]] = set()

    def __init__(self, line: socket.socket, pid: int) -> None:
        line.setblocking(False)  # noqa: FBT003 - its only parameter
        self._line = line
        # The process id of the guard, which lives for as long as any process of the command.
        self.pid = pid
        self._buffer = bytearray()
        self._safe_until: float | None = None
        # Whether the guard ended the command because no update said in time that the lease is safe.
        self.was_late = False
        # Whether the guard ended the command because the announced end of the lease had come.
        self.was_limited = False
        # Why the lease was to end, where the command had been warned: `preempted`, say.
        self.warned_of: str | None = None

    async def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        streams: tuple[int, int, int],
        *,
        group: int,
        grace_s: float,
        safe_until: float | None,
        limit: float | None = None,
        **more: Any,
    ) -> None:
        """Start the command with these standard streams, in this process group (0: one of its own).

        `grace_s` is the time between SIGTERM and SIGKILL if this process dies, or if the command leaves processes
        behind. `safe_until` and `limit` are as in `tell_safe_until` and `tell_limit`.
        `more` is for a guard of another kind. Failure with 126 or 127 where the command cannot be run.
        """
        self._safe_until = safe_until
        limits: dict[str, Any] = {
            "safe_until": safe_until,
            "limit": limit,
            "limit_grace_s": _grace_before(limit, grace_s),
        }
        limits |= {"group": group, "grace_s": grace_s}
        message = guard.frame({"do": "start", "command": list(command), "env": dict(env), **limits, **more})
        sent = socket.send_fds(self._line, [message], list(streams))
        await asyncio.get_running_loop().sock_sendall(self._line, message[sent:])
        answer = await self._receive()
        if answer["event"] == "failed":
            raise _cannot_run(command[0], answer["errno"], answer["why"])

    async def wait(self) -> int:
        """Wait until no process of the command is left; the exit code as in a shell. GuardDied where it is unknown."""
        answer = await self._receive()
        self.was_late, self.was_limited = answer["was_late"], answer["was_limited"]
        self.warned_of = answer["warned_of"]
        return exit_code(answer["status"])

    def tell_safe_until(self, at: float) -> None:
        """Tell the guard when to end the command, on the clock of leases, unless it is told a later time."""
        if at != self._safe_until:
            self._safe_until = at
            self._send({"do": "safe", "until": at})

    def tell_limit(self, at: float | None, grace_s: float, warned_of: str | None = None) -> None:
        """Tell the guard when the lease ends, on the clock of leases: it kills the command then, and sends SIGTERM
        `grace_s` before, or a tenth of the time until then where that is less. `warned_of`: the reason, where the command
        is warned; None: it is the time limit, or a warning is withdrawn.
        """
        self._send({"do": "limit", "at": at, "grace_s": _grace_before(at, grace_s), "warned_of": warned_of})

    def send_signal(self, number: int) -> None:
        self._send({"do": "signal", "number": number})

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to every process of the command, and SIGKILL after `grace_s`. `wait` tells the end."""
        self._send({"do": "end", "grace_s": grace_s})

    def close(self) -> None:
        self._line.close()
        self._guards.discard(self.pid)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the guard has ended, or was killed: `wait` reports it
            self._line.send(guard.frame(message))

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
                self.close()
                await self._kill_orphans()
                raise GuardDied
            self._buffer += data

    async def _kill_orphans(self) -> None:
        # What the command had started became our child when its guard died.
        while left := self._unguarded():
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - WNOHANG does not block
            await asyncio.sleep(_KILL_AGAIN_S)

    def _unguarded(self) -> list[int]:
        guarded = {pid for guard_pid in self._guards for pid in (guard_pid, *guard.descendants(guard_pid))}
        return [pid for pid in guard.descendants(os.getpid()) if pid not in guarded]


class GuardedCommand(GuardLine):
    """A command under guard. It is made before the GPU is requested, because the guard is the holder of the lease."""

    def __init__(self, keeps_open: Sequence[int] = ()) -> None:
        """`keeps_open`: descriptors that stay open for as long as the guard lives, and are not the command's."""
        check_proc()
        guard.become_subreaper()
        line, theirs = socket.socketpair()
        with theirs:
            self._guard = subprocess.Popen(  # noqa: S603 - our own program
                # -I and -S: nothing of the user's environment, and no packages.
                [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *keeps_open],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # In a group of its own, so that a signal to our group does not end both of us at once.
                process_group=0,
            )
        super().__init__(line, self._guard.pid)
        self._guards.add(self.pid)

    def close(self) -> None:
        """End the guard, and with it what may be left of the command."""
        self._line.close()
        self._guard.wait()
        super().close()


def _grace_before(limit: float | None, grace_s: float) -> float:
    return grace_s if limit is None else min(grace_s, max(limit - guard.boot_time(), 0.0) / _GRACE_PARTS)


def exit_code(status: int) -> int:
    """A status of wait(2) as an exit code of a shell."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else SIGNAL_BASE - code


def check_proc() -> None:
    """Raise Failure where what a command starts could not be seen, and so not be ended with it."""
    if not guard.can_see_processes():
        raise Failure(_NO_PROC)


def check_can_run(program: str, environ: Mapping[str, str]) -> None:
    """Raise Failure with 126 or 127 where the program cannot be run: better now than after a night in the queue."""
    if shutil.which(program, path=environ.get("PATH", os.defpath)) is not None:
        return
    # Path.exists would raise where this user may not look.
    if "/" in program and os.path.exists(program):  # noqa: PTH110
        raise _cannot_run(program, errno.EACCES, "")
    raise Failure(f"{program}: no such program; check the name and PATH", NOT_FOUND)


def _cannot_run(program: str, number: int | None, why: str) -> Failure:
    return Failure(f"{program} cannot be run: {_ADVICE.get(number or 0, why)}", CANNOT_RUN)
