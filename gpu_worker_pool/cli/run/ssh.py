"""Commands on other boxes, started by the user's own ssh, each under a guard here."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Final, Self

from gpu_worker_pool.host.guarded import Ended, Guarded, check_can_run, given_input
from gpu_worker_pool.jobs.signals import ENDING, PASSED_ON, Received, Signals

# How long the commands that ssh started have to end by themselves when their lease has ended.
END_S: Final = 15.0
SSH_FAILED: Final = 255
_READ_VARIABLES: Final = 'eval "$(cat)" && exec "$@"'


_LAST_LINE: Final = "# no more variables"
_READ_LINES: Final = (
    f'v=; while IFS= read -r l && [ "$l" != "{_LAST_LINE}" ]; do v="$v$l\n"; done; eval "$v"; exec "$@"'
)


async def run_on_box(
    guarded: Guarded, host: str, command: Sequence[str], variables: Mapping[str, str], signals: Signals, grace_s: float
) -> int:
    """Run `gpu-pool join` on another box in the directory of the same name, as if it ran here; its exit code.

    At a terminal it has that terminal. Elsewhere signals to this process are written to its standard input (--signals), whose
    end tells it that this process or the connection is gone.
    """
    check_can_run("ssh", os.environ)
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not variables
    words = shlex.join([*command[:2], *([] if has_terminal else ["--signals"]), *command[2:]])
    if not has_terminal:
        words = f"sh -c {shlex.quote(_READ_LINES)} sh {words}"
    there = f"cd {shlex.quote(os.getcwd())} && exec {words}"  # noqa: PTH109 - as it was reached
    ssh = ["ssh", *(["-t"] if has_terminal else ["-o", "BatchMode=yes"]), "--", host, there]
    group = os.getpgrp() if has_terminal else 0
    read_end, write_end = os.pipe()
    try:
        await guarded.run(ssh, os.environ, (0 if has_terminal else read_end, 1, 2), group=group, grace_s=grace_s)
    finally:
        os.close(read_end)

    def pass_on(received: Received) -> None:
        if not has_terminal:
            _write(write_end, f"{received.number:d}\n")
        elif not received.is_typed and received.number in ENDING:
            guarded.end(grace_s)  # the terminal there hangs up

    try:
        if not has_terminal:
            exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
            await asyncio.to_thread(_write, write_end, f"{exports}{_LAST_LINE}\n")
        async with signals.passed_to(pass_on):
            return (await guarded.wait()).exit_code
    finally:
        os.close(write_end)


def _write(descriptor: int, text: str) -> None:
    with suppress(BrokenPipeError):  # ssh has ended
        os.write(descriptor, text.encode(errors="surrogateescape"))


def raise_signals_of_input() -> None:
    """Take each line of standard input for the number of a signal to this process, and its end for SIGTERM."""

    def read() -> None:
        for line in sys.stdin:
            if line.strip().isdigit() and int(line) in PASSED_ON:
                os.kill(os.getpid(), int(line))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, name="gpu-pool-signals-of-input", daemon=True).start()


class SshCommands:
    """The commands that ssh has started. Those of a lease end when it does: leave the block after its release."""

    def __init__(self) -> None:
        self._guards = AsyncExitStack()
        self._running: dict[asyncio.Task[Ended], str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=END_S)
        for task in self._running:
            task.cancel()
        await self._guards.aclose()

    async def start(self, node: str, host: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start it on a box, in the directory of the same name, with these variables. Its standard input is empty. Failure where
        there is no ssh.
        """
        check_can_run("ssh", os.environ)
        # Every user of a machine can read command lines, so the values go over standard input.
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        words = f"{shlex.quote(_READ_VARIABLES)} sh {shlex.join(command)}"
        there = f"cd {shlex.quote(os.getcwd())} && exec sh -c {words}"  # noqa: PTH109 - as it was reached
        guarded = await self._guards.enter_async_context(Guarded.start())
        with given_input(exports.encode(errors="surrogateescape")) as sent:
            # After --, a host is not an option, whatever its name is.
            ssh = ["ssh", "-o", "BatchMode=yes", "--", host, there]
            await guarded.run(ssh, os.environ, (sent, 1, 2), grace_s=END_S)
        self._running[asyncio.create_task(guarded.wait())] = node

    async def wait(self) -> tuple[int, str] | None:
        """Wait until one has failed: its exit code, and what happened. None when all have ended well."""
        left = set(self._running)
        while left:
            ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                if code := task.result().exit_code:
                    reason = ", or ssh could not connect" if code == SSH_FAILED else ""
                    return code, f"the command on {self._running[task]} ended with exit code {code}{reason}"
        return None
