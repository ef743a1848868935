"""Live time: the time in which the event loop ran. Leases run on it, because a loop that is away reads no heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

# The ticker rings so often, also when nothing is due. Timers do not count the time while a machine sleeps.
TICK_S = 1.0
# A loop that comes so late for the ticker was away: heartbeats wait in its sockets.
LATE_S = 0.25
# What waits there is read within this time, which is lost as well: a lease may have had less than that left.
READ_S = 0.5


class LiveTime:
    """A ticker that always runs, and notices when the loop comes late for it. `clock` must count the time while the machine
    sleeps. `lose` is called with the time that is lost, before `tick` or what is done next.
    """

    def __init__(self, clock: Callable[[], float], lose: Callable[[float], object], tick: Callable[[], object]) -> None:
        self._clock = clock
        self._lose = lose
        self._tick = tick
        self._ran_at = self._rings_at = inf
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._ran_at = self._clock()
        self._set(self._ran_at + TICK_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._rings_at = None, inf

    def look(self) -> None:
        """Note that the loop runs. This comes before everything that depends on the time."""
        now = self._clock()
        ran_at, self._ran_at = self._ran_at, now
        if now > self._rings_at + LATE_S:
            self._rings_at = now + TICK_S  # the ticker itself rings before that
            self._lose(now - ran_at + READ_S)

    def ring_at(self, due_at: float) -> None:
        """Ring at this time, if that is before the next tick."""
        if due_at < self._rings_at < inf:
            self._set(max(due_at, self._clock()))

    def _set(self, rings_at: float) -> None:
        self.stop()
        self._rings_at = rings_at
        self._timer = asyncio.get_running_loop().call_later(max(rings_at - self._clock(), 0.0), self._ring)

    def _ring(self) -> None:
        self.look()
        self._set(self._ran_at + TICK_S)
        self._tick()
