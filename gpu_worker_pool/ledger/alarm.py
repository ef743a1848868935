"""The timer that wakes the driver when something is due though no command comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf

from .hearing import Hearing

# The longest timer: timers do not count the time while a machine sleeps.
MAX_ALARM_S = 1.0
# The shortest timer while leases are due that heartbeats which wait may save.
MIN_ALARM_S = 0.02


class Alarm:
    def __init__(self, ring: Callable[[], None], hearing: Hearing) -> None:
        self._ring = ring
        self._hearing = hearing
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = inf
        self._set_at = -inf
        self._rings_at = inf

    def set(self, due_at: float, now: float) -> None:
        """Ring when this is due, or earlier: a timer that rings before is left, because most steps only put off what is due."""
        if due_at == self._due_at and self._timer is not None:
            return
        shortest_s = MIN_ALARM_S if self._hearing.until < due_at else 0.0
        nap_s = min(max(due_at - now, shortest_s), MAX_ALARM_S)
        rings_at = time.monotonic() + nap_s
        self._due_at, self._set_at = due_at, now
        if self._timer is not None and self._rings_at <= rings_at:
            return
        self.cancel()
        if due_at < inf:
            self._rings_at = rings_at
            self._timer = asyncio.get_running_loop().call_later(nap_s, self._wake)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Note if it should have rung already: the event loop was away."""
        if self._timer is not None:
            # Not by the loop's own time, which stands still while it works.
            self._hearing.note_lateness(time.monotonic() - self._rings_at, self._set_at)

    def _wake(self) -> None:
        self.look()
        self._timer = None
        self._ring()
