"""Until when all heartbeats that arrived are carried out. No lease that was due later may expire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from math import inf

# An event loop that comes so late was away: heartbeats wait in its sockets.
LATE_S = 0.25
# After that it hears them in so many rounds: a connection is accepted, the request read, its caller found out.
ROUNDS = 10
ROUND_S = 0.05


class Hearing:
    """`clock` is the pool's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The heartbeats that wait for their turn, in the order in which they arrived.
        self._arrived_at: dict[Hashable, float] = {}
        # What is read now may have arrived since then.
        self.away_since = inf
        self._rounds_left = 0

    @property
    def until(self) -> float:
        """All that arrived before this time are carried out; infinity if all are."""
        if not self._arrived_at:
            return self.away_since
        return min(next(iter(self._arrived_at.values())), self.away_since)

    def add(self, call: Hashable, arrived_at: float | None) -> None:
        if arrived_at is not None:
            self._arrived_at[call] = arrived_at

    def discard(self, call: Hashable) -> None:
        self._arrived_at.pop(call, None)

    def note_lateness(self, late_s: float, was_there_at: float = inf) -> None:
        """Note how late the event loop is for what it had to do, and when it was last there; else when that was due."""
        if late_s < LATE_S:
            return
        self.away_since = min(self.away_since, was_there_at, self._clock() - late_s)
        is_under_way = self._rounds_left > 0
        self._rounds_left = ROUNDS
        if not is_under_way:
            asyncio.get_running_loop().call_later(ROUND_S, self._hear)

    def _hear(self) -> None:
        self._rounds_left -= 1
        if not self._rounds_left and self.away_since in self._arrived_at.values():
            self._rounds_left = 1  # what was read has not had its turn yet
        if self._rounds_left:
            asyncio.get_running_loop().call_later(ROUND_S, self._hear)
        else:
            self.away_since = inf
