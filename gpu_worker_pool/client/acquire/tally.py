"""Counts of the requests of a client, by outcome."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager


class Tally:
    def __init__(self) -> None:
        self.requests = 0
        self.granted = 0
        self.failed = 0
        self.by_endpoint: Counter[str] = Counter()
        # Requests that wait at present, and the last ones that have stopped waiting though a server may still list them.
        self.waiting: set[str] = set()
        self.done: deque[str] = deque(maxlen=1000)

    @contextmanager
    def counted(self, lease_id: str) -> Iterator[None]:
        """Count a request, which may wait meanwhile."""
        self.requests += 1
        try:
            yield
        finally:
            self.waiting.discard(lease_id)
            self.done.append(lease_id)

    def count_grant(self, endpoint_id: str) -> None:
        self.granted += 1
        self.by_endpoint[endpoint_id] += 1

    @property
    def success_rate(self) -> float:
        """The successes in percent of the requests that are over; 100 where none is."""
        done = self.granted + self.failed
        return round(100.0 * self.granted / done, 2) if done else 100.0
