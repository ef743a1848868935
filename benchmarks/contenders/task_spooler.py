"""`ts` (task-spooler, on Debian `tsp`): a queue of commands with as many slots as there are GPUs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import peers
from benchmarks.contenders.contender import Command, Serving
from benchmarks.processes import environment, wait_until

SWEEP_S = 180.0


class SpoolerQueue:
    """Commands one by one, without their output."""

    def __init__(self, program: str, folder: Path, slots: int) -> None:
        self._program = program
        self._folder = folder
        many = {"TS_MAXFINISHED": "100000", "TS_MAXCONN": "1000"}
        self._env = environment(
            {"TS_SOCKET": str(folder / "socket"), "TMPDIR": str(folder), "TS_SLOTS": str(slots), **many}
        )
        self._slots = slots

    def run_one(self, command: Command) -> None:
        """Run it with `-f`, which waits for its end."""
        self.ask("-n", "-f", *command)

    def run_all(self, commands: Sequence[Command]) -> None:
        self.line_up(commands)()

    def line_up(self, commands: Sequence[Command]) -> Callable[[], None]:
        over = self._folder / f"over-{time.monotonic_ns()}"
        for command in commands:
            self.ask("-n", *command)
        # It needs all slots, so it runs when all others have ended.
        self.ask("-n", "-N", str(self._slots), "touch", str(over))
        return lambda: wait_until(over.exists, "ts has run all commands", SWEEP_S)

    def ask(self, *words: str) -> str:
        """Run `ts`; RuntimeError if it has failed."""
        done = subprocess.run(
            [self._program, *words], env=self._env, capture_output=True, text=True, check=False, timeout=SWEEP_S
        )
        if done.returncode:
            raise RuntimeError(f"ts {words[0]} failed: {done.stderr.strip()}")
        return done.stdout.strip()


@contextmanager
def serve(folder: Path, gpus: int) -> Iterator[Serving]:
    """Its first command starts its server."""
    queue = SpoolerQueue(peers.program("tsp"), folder, gpus)
    try:
        yield Serving({}, queue=queue)
    finally:
        queue.ask("-K")
