"""Commands of `gpu-pool` on other boxes, started by the user's own ssh, each under a guard here."""

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

from gpu_worker_pool.host.guarded import Guarded, check_can_run
from gpu_worker_pool.jobs.signals import ENDING, PASSED_ON, Received

# How long the commands that ssh started have to end by themselves when their lease has ended.
END_S: Final = 15.0
SSH_FAILED: Final = 255
_LAST_LINE: Final = "# no more variables"
_READ_LINES: Final = (
    f'v=; while IFS= read -r l && [ "$l" != "{_LAST_LINE}" ]; do v="$v$l\n"; done; eval "$v"; exec "$@"'
)


class SshCommands:
    """The commands that ssh has started. Those of a lease end when it does: leave the block after its release.

    Where one `has_terminal`, it has that of this process. Each other one reads from its standard input first the variables for
    its command, because every user of a machine can read command lines, and then the signals that it is to get (--signals). The
    end of that input tells it that this process or the connection is gone.
    """

    def __init__(self, grace_s: float = END_S, *, has_terminal: bool = False) -> None:
        self._grace_s, self._has_terminal = grace_s, has_terminal
        self._guarded = AsyncExitStack()
        self._pipes: list[int] = []
        self._guards: list[Guarded] = []
        self._running: dict[asyncio.Task[int], str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._pipes:
            os.close(self._pipes.pop())
        if self._running:
            await asyncio.wait(self._running, timeout=END_S)
        for task in self._running:
            task.cancel()
        await self._guarded.aclose()

    async def start(self, node: str, host: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start it on a box, in the directory of the same name. Failure where there is no ssh."""
        check_can_run("ssh", os.environ)
        guarded = await self._guarded.enter_async_context(Guarded.start())
        self._guards.append(guarded)
        given, sent = os.pipe()
        self._pipes.append(sent)
        words, flags, group = shlex.join(command), ["-t"], os.getpgrp()
        if not self._has_terminal:
            words = f"sh -c {shlex.quote(_READ_LINES)} sh {shlex.join([*command[:2], '--signals', *command[2:]])}"
            flags, group = ["-o", "BatchMode=yes"], 0
        there = f"cd {shlex.quote(os.getcwd())} && exec {words}"  # noqa: PTH109 - as it was reached
        try:
            # After --, a host is not an option, whatever its name is.
            ssh = ["ssh", *flags, "--", host, there]
            streams = (0 if self._has_terminal else given, 1, 2)
            await guarded.run(ssh, os.environ, streams, group=group, grace_s=self._grace_s)
        finally:
            os.close(given)
        self._running[asyncio.create_task(_exit_code(guarded))] = node
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        await asyncio.to_thread(_write, sent, f"{exports}{_LAST_LINE}\n")

    def take_signal(self, received: Received) -> None:
        """Pass a signal on to all of them."""
        for sent in self._pipes:
            _write(sent, f"{received.number:d}\n")
        if self._has_terminal and not received.is_typed and received.number in ENDING:
            for guarded in self._guards:
                guarded.end(self._grace_s)  # the terminal there hangs up

    async def wait(self) -> tuple[int, str] | None:
        """Wait until one has failed: its exit code, and its box. None when all have ended well."""
        left = set(self._running)
        while left:
            ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                if code := task.result():
                    return code, self._running[task]
        return None


async def _exit_code(guarded: Guarded) -> int:
    return (await guarded.wait()).exit_code


def _write(descriptor: int, text: str) -> None:
    with suppress(BrokenPipeError):  # ssh has ended, or has the terminal
        os.write(descriptor, text.encode(errors="surrogateescape"))


def raise_signals_of_input() -> None:
    """Take each line of standard input for the number of a signal to this process, and its end for SIGTERM."""

    def read() -> None:
        for line in sys.stdin:
            if line.strip().isdigit() and int(line) in PASSED_ON:
                os.kill(os.getpid(), int(line))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, name="gpu-pool-signals-of-input", daemon=True).start()
