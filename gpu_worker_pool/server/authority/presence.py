"""Who waits for an answer on an open connection, and whose connection broke off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class TooManyWaiting(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """As many connections wait as the server has room for."""

    def __init__(self, most: int) -> None:
        super().__init__(f"{most} connections wait for a lease already, and no more can; ask without wait_s, or later.")


@dataclass(slots=True)
class WaitingConnection:
    """A connection on which an answer is held back; broken where the client left before it had the answer."""

    is_broken: bool = False


class Presence:
    """Counts the connections that wait. `max_waiting` is how many may."""

    def __init__(self, max_waiting: int) -> None:
        self.waiting = 0
        self._max_waiting = max_waiting
        self._polls: Counter[str] = Counter()
        self._away: set[str] = set()

    @property
    def has_room(self) -> bool:
        """Whether one more may wait."""
        return self.waiting < self._max_waiting

    @contextmanager
    def connection(self, lease_id: str | None) -> Iterator[WaitingConnection]:
        """Count a connection that waits, as a heartbeat of this lease if it is its asker's. TooManyWaiting where there is
        no room. When the asker's last connection breaks off the lease keeps its place: the asker may come back.
        """
        if not self.has_room:
            raise TooManyWaiting(self._max_waiting)
        connection = WaitingConnection()
        self.waiting += 1
        if lease_id is not None:
            self._polls[lease_id] += 1
            self._away.discard(lease_id)
        try:
            yield connection
        finally:
            self.waiting -= 1
            if lease_id is not None:
                self._polls[lease_id] -= 1
                if not self._polls[lease_id]:
                    del self._polls[lease_id]
                    if connection.is_broken:
                        self._away.add(lease_id)
                if not connection.is_broken:
                    self._away.discard(lease_id)

    def was_heard_of(self, *lease_ids: str) -> None:
        """Note a heartbeat of these leases, or their end."""
        self._away.difference_update(lease_ids)

    def is_away(self, lease_id: str) -> bool:
        """Whether the last that was seen of its asker is a connection that broke off."""
        return lease_id in self._away
