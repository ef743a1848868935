"""Runs the program of a hook under a guard of its own (host/guard.py), so that nothing that it starts outlives it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from gpu_worker_pool.host import guard
from gpu_worker_pool.host.clock import boot_time

from .rule import Program

# A killed process is gone by then, unless it is stuck in the kernel or belongs to another user.
_KILL_S = 5.0


async def run_program(program: Program, sent: bytes, env: Mapping[str, str], limit_s: float) -> str | None:
    """Run it with this standard input until it ends, at most for its time; why it failed, or None. All that it started is
    ended then, also if this is cancelled.
    """
    name = program.arguments[0]
    try:
        async with asyncio.timeout(limit_s + _KILL_S), _guard() as line:
            ended = await _guarded(line, program, sent, env, limit_s)
    except OSError as error:  # also a TimeoutError
        return f"{name} cannot be run or ended: {error.strerror or type(error).__name__}"
    if ended is None:
        return f"the guard of {name} was killed"
    if ended["event"] == "failed":
        return f"{name} cannot be started: {ended['why']}"
    if ended["was_limited"]:
        return f"{name} has not ended within {limit_s:g} s"
    code = os.waitstatus_to_exitcode(ended["status"])
    return f"{name} ended with {code}" if code else None


@asynccontextmanager
async def _guard() -> AsyncIterator[socket.socket]:
    """The line to a new guard, which ends when the line closes, and ends all that it guards before."""
    line, theirs = socket.socketpair()
    with line:
        line.setblocking(False)  # noqa: FBT003 - its only parameter
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        try:
            yield line
        finally:
            line.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_S)


async def _guarded(
    line: socket.socket, program: Program, sent: bytes, env: Mapping[str, str], limit_s: float
) -> dict[str, Any] | None:
    """What the guard says of the end of the program; None if it says nothing."""
    loop = asyncio.get_running_loop()
    # It is ended without grace: SIGKILL follows SIGTERM at once.
    limits = {"grace_s": 0.0, "safe_until": None, "limit": boot_time() + limit_s, "limit_grace_s": 0.0}
    what = {"command": list(program.arguments), "env": dict(env), "cwd": program.cwd, "group": 0}
    message = guard.frame({"do": "start", **what, **limits})
    reading, writing = os.pipe()
    with open(reading, "rb") as theirs, open(os.devnull, "wb") as null:  # noqa: ASYNC230, PTH123 - they do not block
        ours, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, open(writing, "wb", 0))  # noqa: ASYNC230, PTH123, SIM115
        ours.write(sent)
        ours.close()  # once all is written, or the program is gone
        done = socket.send_fds(line, [message], [theirs.fileno(), null.fileno(), null.fileno()])
    await loop.sock_sendall(line, message[done:])
    buffer = bytearray()
    with suppress(ConnectionError):
        while data := await loop.sock_recv(line, 65536):
            buffer += data
            for answer in guard.unframe(buffer):
                if answer["event"] != "started":
                    return answer
    return None
