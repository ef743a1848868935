"""A server that notes the longest turn of its event loop, in processor time, and writes it to a file when it gets SIGUSR1.

uvloop cannot be asked for that, so this server has asyncio's own loop.
"""

from __future__ import annotations

import runpy
import selectors
import signal
import sys
from pathlib import Path

from benchmarks.turns import TimedSelector

FILE = "longest_turn"


class LeaderSelector(TimedSelector):
    made: LeaderSelector

    def __init__(self) -> None:
        super().__init__()
        LeaderSelector.made = self


def _tell(*_: object) -> None:
    written = Path(f"{FILE}.new")
    written.write_text(str(LeaderSelector.made.longest_cpu_s), encoding="ascii")
    LeaderSelector.made.start_over()
    written.rename(FILE)


if __name__ == "__main__":
    sys.modules["uvloop"] = None  # type: ignore[assignment] # so that uvicorn does not find it
    selectors.DefaultSelector = LeaderSelector  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, _tell)
    runpy.run_module("gpu_worker_pool.testing", run_name="__main__", alter_sys=True)
