"""A program of the benchmarks in a process of its own, which says what it has to say in lines of JSON.

It is started as the servers are, so that a test starts it as quickly. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gpu_worker_pool.testing import ServerProcess


class Child:
    """A module of the benchmarks that runs, and was told these arguments."""

    def __init__(self, module: str, arguments: Sequence[Any]) -> None:
        command = [sys.executable, "-m", module, json.dumps(arguments)]
        self._process = ServerProcess.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def receive(self, limit_s: float) -> Any:
        """Return what it says next."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        assert ready, f"it said nothing within {limit_s:g} s"
        return json.loads(self._process.stdout.readline())

    def tell_to_end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def arguments() -> Any:
    """Return what this process was told when it was started."""
    return json.loads(sys.argv[1])


def say(what: Any) -> None:
    """Tell the process that has started this one."""
    print(json.dumps(what), flush=True)


async def until_told_to_end() -> None:
    """Wait until that process closes the pipe, or ends."""
    await asyncio.to_thread(sys.stdin.read)
