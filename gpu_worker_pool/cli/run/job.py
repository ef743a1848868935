"""A command under guard, as `gpu-pool` sees it: see guard.py for what that means."""

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

from . import guard

_ADVICE = {
    errno.ENOENT: "the program that its first line names is not there",
    errno.EACCES: "it may not be executed; chmod +x, or name the program that runs it (python …)",
    errno.ENOEXEC: "it is no program; give it a first line such as #!/bin/sh, or name the program that runs it",
}
# How often what does not go is killed again: it may have forked in between.
_KILL_AGAIN_S = 0.01


class GuardDied(Exception):  # noqa: N818 - what happened
    """Somebody killed the guard. What it guarded is dead by then."""


class GuardedCommand:
    """Made before the GPU is asked for, because its guard is who holds the lease."""

    # The guards that live; what else descends from us was left by one that was killed.
    _guards: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        guard.become_subreaper()
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)  # noqa: FBT003 - its only parameter
        with theirs:
            self._guard = subprocess.Popen(  # noqa: S603 - our own program
                # -I and -S: nothing of the user's environment, and no packages.
                [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A group of its own, so that what is sent to ours does not end both of us at once.
                process_group=0,
            )
        self._guards.add(self._guard.pid)
        self._buffer = bytearray()
        self.command_pid: int | None = None
        # Whether the guard ended it, because it was not told in time that the lease is safe.
        self.was_late = False

    @property
    def pid(self) -> int:
        """The guard's: while it lives, so does something of the command."""
        return self._guard.pid

    async def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        streams: tuple[int, int, int],
        *,
        group: int,
        grace_s: float,
        safe_until: float | None,
    ) -> None:
        """Run it with these standard streams, in this process group (0: one of its own). `grace_s` is what it has between
        SIGTERM and SIGKILL if we die, or if it leaves something behind; `safe_until` is as in `tell_safe_until`. Failure
        with 126 or 127 where it cannot be run.
        """
        message = guard.frame(
            {
                "do": "start",
                "command": list(command),
                "env": dict(env),
                "safe_until": safe_until,
                "group": group,
                "grace_s": grace_s,
            }
        )
        sent = socket.send_fds(self._line, [message], list(streams))
        await asyncio.get_running_loop().sock_sendall(self._line, message[sent:])
        answer = await self._hear()
        if answer["event"] == "failed":
            raise _cannot_run(command[0], answer["errno"], answer["why"])
        self.command_pid = answer["pid"]

    async def wait(self) -> int:
        """Wait until nothing of it is left; its exit code, as a shell would tell it. GuardDied where that is not known."""
        answer = await self._hear()
        self.was_late = answer["was_late"]
        code = os.waitstatus_to_exitcode(answer["status"])
        return code if code >= 0 else SIGNAL_BASE - code

    def tell_safe_until(self, at: float) -> None:
        """Until when the lease is safe, on the clock that leases run on: if nothing more is told, all of it is ended then."""
        self._say({"do": "safe", "until": at})

    def send_signal(self, number: int) -> None:
        """To all of it."""
        self._say({"do": "signal", "number": number})

    def end(self, grace_s: float) -> None:
        """SIGTERM to all of it now, SIGKILL after this long; `wait` tells when it is gone."""
        self._say({"do": "end", "grace_s": grace_s})

    def close(self) -> None:
        """Let the guard go, and what may be left of its command with it."""
        self._line.close()
        self._guard.wait()
        self._guards.discard(self._guard.pid)

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended, or was killed: `wait` says so
            self._line.send(guard.frame(message))

    async def _hear(self) -> dict[str, Any]:
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
                await self._kill_what_it_left()
                raise GuardDied
            self._buffer += data

    async def _kill_what_it_left(self) -> None:
        """What the command had started is our child now that its guard is dead."""
        while left := self._unguarded():
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - that does not block
            await asyncio.sleep(_KILL_AGAIN_S)

    def _unguarded(self) -> list[int]:
        guarded = {pid for guard_pid in self._guards for pid in (guard_pid, *guard.descendants(guard_pid))}
        return [pid for pid in guard.descendants(os.getpid()) if pid not in guarded]


def check_can_run(program: str, environ: Mapping[str, str]) -> None:
    """Failure with 126 or 127 where it surely cannot be run: better now than after a night in the queue."""
    if shutil.which(program, path=environ.get("PATH", os.defpath)) is not None:
        return
    if "/" in program and Path(program).exists():
        raise _cannot_run(program, errno.EACCES, "")
    raise Failure(f"{program}: no such program; check its name and the PATH", NOT_FOUND)


def _cannot_run(program: str, number: int, why: str) -> Failure:
    return Failure(f"{program} cannot be run: {_ADVICE.get(number, why)}", CANNOT_RUN)
