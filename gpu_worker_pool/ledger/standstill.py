"""Notices that the process stood still, or was busy, for so long that it could take no heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

# No process that runs is this late for a timer.
LONG_S = 4.0
# Processor time is read so often: that takes long, and it only decides between two sentences.
READ_S = 1.0


class StandstillWatch:
    """`work_clock` is the CPU time of the thread that takes the steps."""

    def __init__(self, work_clock: Callable[[], float] = time.thread_time) -> None:
        self._work_clock = work_clock
        self._last_at = self._read_at = inf
        self._worked_s = 0.0

    def note_step(self, now: float) -> str | None:
        """Note a step; return in words what happened if the last one was too long ago, else None."""
        away_s, self._last_at = now - self._last_at, now
        if -inf < now - self._read_at < READ_S:
            return None
        worked_s = self._work_clock()
        busy_s, self._worked_s, self._read_at = worked_s - self._worked_s, worked_s, now
        if away_s < LONG_S:
            return None
        # A process that was stopped did no work meanwhile.
        if busy_s > away_s / 2:
            return f"was busy for {away_s:.1f} s"
        return f"stood still for {away_s:.1f} s (it was stopped, or its machine slept or was busy otherwise)"
