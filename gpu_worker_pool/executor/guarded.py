"""A guard as the executor sees it; host/guard.py says what a guard does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from gpu_worker_pool.client.inherited_lease import LEASE_ID_VARIABLE
from gpu_worker_pool.host import guard

_NO_PROC: Final = (
    "/proc does not show this process, so what a task starts could not be ended with it; mount the /proc of this container "
    "(mount -t proc proc /proc)"
)
# A process may fork while it is looked for. What is there after so many rounds is stuck in the kernel.
_MOST_ROUNDS: Final = 200
_PAUSE_S: Final = 0.005


class GuardDied(Exception):  # noqa: N818 - what happened
    """The guard was killed. What it guarded is dead by then."""


class Ended(NamedTuple):
    """The end of a process: its status as wait(2) has it, and why the guard ended it, if it did."""

    status: int
    was_late: bool
    was_limited: bool


class Guarded:
    """A process and its guard, in whose name the lease is requested before. Used in one event loop."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._line, self._process = line, process
        self.pid = process.pid
        self._lease_id = ""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @classmethod
    def start(cls) -> Self:
        if not guard.can_see_processes():
            raise RuntimeError(_NO_PROC)
        line, theirs = socket.socketpair()
        with theirs:
            # -I and -S: nothing of the user's environment, and no packages. The line is its standard input, so its number
            # is low, however many files this process has open.
            program = [sys.executable, "-I", "-S", str(Path(guard.__file__)), "0"]
            # In a group of its own, because Ctrl-C is for the user's program.
            return cls(
                line, subprocess.Popen(program, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0)
            )  # noqa: S603 - our own program

    async def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        streams: tuple[int, int, int],
        *,
        grace_s: float,
        safe_until: float | None,
        limit: float | None,
    ) -> None:
        """Start the process on its lease."""
        self._lease_id = env.get(LEASE_ID_VARIABLE, "")
        message = {"do": "start", "command": list(command), "env": dict(env), "group": 0, "grace_s": grace_s}
        framed = guard.frame({**message, "safe_until": safe_until, "limit": limit, "limit_grace_s": grace_s})
        with suppress(OSError):  # it was killed, as `_receive` sees
            socket.send_fds(self._line, [framed[:1]], list(streams))
        self._streams = await asyncio.open_connection(sock=self._line)
        self._streams[1].write(framed[1:])
        answer = await self._receive()
        if answer["event"] == "failed":
            raise OSError(answer["errno"], answer["why"])

    async def wait(self) -> Ended:
        """Wait until none of its processes is left. GuardDied where it is not known how it ended."""
        answer = await self._receive()
        return Ended(answer["status"], answer["was_late"], answer["was_limited"])

    def tell_safe_until(self, at: float) -> None:
        """Tell the guard when to end the process, unless it is told a later time."""
        self._send({"do": "safe", "until": at})

    def tell_limit(self, at: float | None, grace_s: float) -> None:
        """Tell the guard when the lease ends: the process is told to end one grace before, and killed then."""
        self._send({"do": "limit", "at": at, "grace_s": grace_s})

    def send_signal(self, number: int) -> None:
        self._send({"do": "signal", "number": number})

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to all of its processes, and SIGKILL after the grace."""
        self._send({"do": "end", "grace_s": grace_s})

    @property
    def is_gone(self) -> bool:
        """Whether the guard has ended."""
        return self._process.poll() is not None

    async def close(self) -> None:
        """End the guard. Called when the lease is released."""
        if self._streams is None:
            self._line.close()
        else:
            self._streams[1].close()
        await asyncio.to_thread(self._process.wait)

    def forget(self) -> None:
        """Close the line; in a forked process, in which the guard is that of the parent, nothing else."""
        self._line.close()

    def _send(self, message: dict[str, Any]) -> None:
        if self._streams is not None:
            self._streams[1].write(guard.frame(message))

    async def _receive(self) -> dict[str, Any]:
        assert self._streams is not None  # noqa: S101 - it runs
        reader = self._streams[0]
        try:
            (size,) = guard.LENGTH.unpack(await reader.readexactly(guard.LENGTH.size))
            said: dict[str, Any] = json.loads(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            await asyncio.to_thread(_kill_orphans, self._lease_id)
            raise GuardDied from None
        return said


def _kill_orphans(lease_id: str) -> None:
    """Kill all processes that were started with this lease in their environment. One that has none cannot be found."""
    if not lease_id or lease_id == os.environ.get(LEASE_ID_VARIABLE):
        return  # it is that of the program itself
    mark = f"{LEASE_ID_VARIABLE}={lease_id}".encode()
    for _ in range(_MOST_ROUNDS):
        names = os.listdir("/proc") if os.readlink("/proc/self") == str(os.getpid()) else []  # noqa: PTH208, PTH115 - quick
        if not any([_kill_if_marked(int(name), mark) for name in names if name.isdigit()]):  # noqa: C419 - all of them
            return
        time.sleep(_PAUSE_S)


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    if pid == os.getpid():
        return False
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False  # it has just ended
    try:
        is_marked = mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if is_marked:
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:
        return False  # the same, or it is that of another user
    finally:
        os.close(process)
    return is_marked
