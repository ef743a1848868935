"""How the requests of a client have gone."""

from __future__ import annotations

from collections import deque


class Tally:
    """How the requests of this client have gone."""

    def __init__(self) -> None:
        self.requests = 0
        self.granted = 0
        self.failed = 0
        self.by_endpoint: dict[str, int] = {}
        # Requests of this client that wait at present, and the last ones that do no more though a server may still say so.
        self.waiting: set[str] = set()
        self.done: deque[str] = deque(maxlen=1000)

    @property
    def success_rate(self) -> float:
        """In percent of those that are over; 100 where none is."""
        done = self.granted + self.failed
        return round(100.0 * self.granted / done, 2) if done else 100.0
