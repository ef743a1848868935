"""The connections that wait for an answer, and the callers that were told a 503."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# So many leases may the connections of one caller wait for together. No honest caller has as many, and each costs memory.
MOST_WATCHED = 10_000


class TooManyWaiting(Exception):  # noqa: N818 - a state, not a mistake
    def __init__(self, most: int) -> None:
        super().__init__(
            f"{most} connections wait for a lease already, which is the limit; ask without wait_s, or later."
        )


@dataclass(slots=True)
class WaitingConnection:
    """A connection whose answer is held back; `is_broken` if the client left before the answer."""

    is_broken: bool = False


class Presence:
    """Counts the connections that wait; at most `max_waiting` may. `on_left` is called with a lease when the last connection
    broke on which its client waited.
    """

    def __init__(self, max_waiting: int, on_left: Callable[[str], None]) -> None:
        self.waiting = 0
        self._max_waiting = max_waiting
        self._on_left = on_left
        self._polls: Counter[str] = Counter()
        self._watched: Counter[str] = Counter()
        # With a note of its own for each time that the caller was not told.
        self._unclaimed: dict[str, object] = {}

    @property
    def has_room(self) -> bool:
        return self.waiting < self._max_waiting

    def has_room_for(self, leases: int, caller: str) -> bool:
        """Whether a connection of this caller may wait for so many leases."""
        return self.has_room and self._watched[caller] + leases <= MOST_WATCHED

    @contextmanager
    def watching(self, leases: int, caller: str) -> Iterator[None]:
        self._watched[caller] += leases
        try:
            yield
        finally:
            self._watched[caller] -= leases
            if not self._watched[caller]:
                del self._watched[caller]

    @contextmanager
    def connection(self, lease_id: str | None) -> Iterator[WaitingConnection]:
        """Count a connection that waits; TooManyWaiting if there is no room. `lease_id` is None unless the client may
        renew the lease: then the connection counts as its heartbeat. The lease keeps its queue position when the last
        connection breaks, because the client may come back.
        """
        if not self.has_room:
            raise TooManyWaiting(self._max_waiting)
        connection = WaitingConnection()
        self.waiting += 1
        if lease_id is not None:
            self._polls[lease_id] += 1
        try:
            yield connection
        finally:
            self.waiting -= 1
            if lease_id is not None:
                self._polls[lease_id] -= 1
                if not self._polls[lease_id]:
                    del self._polls[lease_id]
                    if connection.is_broken:
                        self._on_left(lease_id)

    def note_heartbeat(self, *lease_ids: str) -> None:
        """Note a heartbeat of these leases, or their end."""
        for lease_id in lease_ids:
            self._unclaimed.pop(lease_id, None)

    def note_unclaimed(self, lease_id: str) -> None:
        """Note that the caller was answered with 503, though its request may be written, now or later."""
        self._unclaimed[lease_id] = object()

    def take_over(self, lease_ids: Iterable[str]) -> None:
        """Note that no caller of these leases has called this leader yet, whatever callers were told before."""
        self._unclaimed = {lease_id: object() for lease_id in lease_ids}

    def unclaimed(self, lease_id: str) -> object | None:
        """The last such note on a lease whose caller did not call again; None if it did, or needs not."""
        return self._unclaimed.get(lease_id)
