"""The timer that wakes the driver when something is due though no command comes."""

from __future__ import annotations

import asyncio
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

    def set(self, due_at: float, now: float) -> None:
        if due_at == self._due_at and self._timer is not None:
            return
        self.cancel()
        self._due_at = due_at
        if due_at < inf:
            shortest_s = MIN_ALARM_S if self._hearing.until < due_at else 0.0
            nap_s = min(max(due_at - now, shortest_s), MAX_ALARM_S)
            self._timer = asyncio.get_running_loop().call_later(nap_s, self._wake)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Note if it should have rung already: the event loop was away."""
        if self._timer is not None:
            self._hearing.note_lateness(asyncio.get_running_loop().time() - self._timer.when())

    def _wake(self) -> None:
        self.look()
        self._timer = None
        self._ring()
