"""Runs the program of a hook under a guard of its own (host/guard.py), so that nothing that it starts outlives it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpu_worker_pool.host import guard
from gpu_worker_pool.host.clock import boot_time

# A killed process is gone by then, unless it is stuck in the kernel or belongs to another user.
_KILL_S = 5.0


async def run_program(
    command: Sequence[str], sent: bytes, *, env: Mapping[str, str], cwd: str, limit_s: float
) -> str | None:
    """Run it with this standard input until it ends, at most for its time; why it failed, or None. All that it started is
    ended then, also if this is cancelled.
    """
    name = command[0]
    # It is ended without grace: SIGKILL follows SIGTERM at once.
    limits = {"grace_s": 0.0, "safe_until": None, "limit": boot_time() + limit_s, "limit_grace_s": 0.0}
    start = {"do": "start", "command": list(command), "env": dict(env), "cwd": cwd, "group": 0, **limits}
    try:
        async with asyncio.timeout(limit_s + _KILL_S):
            ended = await _guarded(start, sent)
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


async def _guarded(start: Mapping[str, Any], sent: bytes) -> dict[str, Any] | None:
    """What a new guard says of the end of the program; None if it says nothing."""
    loop = asyncio.get_running_loop()
    line, theirs = socket.socketpair()
    with line, theirs, open(os.memfd_create("notice"), "r+b") as notice, open(os.devnull, "r+b") as null:  # noqa: ASYNC230, PTH123
        notice.write(sent)
        notice.seek(0)
        line.setblocking(False)  # noqa: FBT003 - its only parameter
        process = await asyncio.create_subprocess_exec(
            # The line is its standard input: the number of its own descriptor may be too high for select.
            *(sys.executable, "-I", "-S", guard.__file__, "0"),
            stdin=theirs.fileno(),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        try:
            message = guard.frame(dict(start))
            done = socket.send_fds(line, [message], [notice.fileno(), null.fileno(), null.fileno()])
            await loop.sock_sendall(line, message[done:])
            buffer = bytearray()
            with suppress(ConnectionError):
                while data := await loop.sock_recv(line, 65536):
                    buffer += data
                    for answer in guard.unframe(buffer):
                        if answer["event"] != "started":
                            return answer
            return None
        finally:
            line.close()  # the guard ends what is left of the program, and itself
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_S)
