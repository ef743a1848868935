"""A server that notes the longest turn of its event loop, in processor time, and writes it to a file when it gets SIGUSR1.

A turn is what the loop does between two waits for sockets and timers. uvloop cannot be asked for that, so this server has
asyncio's own loop.
"""

from __future__ import annotations

import os
import runpy
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gpu_worker_pool.testing import ServerProcess

FILE = "longest_turn"
# The command of a ServerProcess.
TIMED = (sys.executable, "-m", "benchmarks.shared.timed_server")
ANSWER_S = 10.0


class TimedSelector(selectors.DefaultSelector):
    """Notes how long the loop stays away between two waits."""

    longest_cpu_s = longest_s = 0.0
    _since: tuple[float, float] | None = None

    def select(self, timeout: float | None = None) -> Any:
        if self._since is not None:
            self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - self._since[0])
            self.longest_s = max(self.longest_s, time.perf_counter() - self._since[1])
        found = super().select(timeout)
        self._since = (time.thread_time(), time.perf_counter())
        return found

    def start_over(self) -> None:
        self.longest_cpu_s = self.longest_s = 0.0


def longest_turn_s(server: ServerProcess) -> float:
    """Return the longest turn since this was called last, in processor time."""
    told = server.folder / FILE
    told.unlink(missing_ok=True)
    os.kill(server.pid, signal.SIGUSR1)
    deadline = time.monotonic() + ANSWER_S
    while not told.exists():
        assert time.monotonic() < deadline, f"the server did not answer within {ANSWER_S:g} s"
        time.sleep(0.005)
    return float(told.read_text(encoding="ascii"))


class ServerSelector(TimedSelector):
    """The selector of the server's only loop."""

    made: ServerSelector

    def __init__(self) -> None:
        super().__init__()
        ServerSelector.made = self


def _tell(*_: object) -> None:
    written = Path(f"{FILE}.new")
    written.write_text(str(ServerSelector.made.longest_cpu_s), encoding="ascii")
    ServerSelector.made.start_over()
    written.rename(FILE)


if __name__ == "__main__":
    sys.modules["uvloop"] = None  # type: ignore[assignment] # so that uvicorn does not find it
    selectors.DefaultSelector = ServerSelector  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, _tell)
    runpy.run_module("gpu_worker_pool.testing", run_name="__main__", alter_sys=True)
