"""The queue: all waiters by priority and arrival, each with the class of requests that it belongs to."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from .lease import QueuedLease
from .request import Request, Wishes


@dataclass(frozen=True, eq=False, slots=True)
class RequestClass:
    """All that decides whether a waiter can be served, apart from its place. Waiters of one class have the same object, so
    what was found out for one holds for all.
    """

    wishes: Wishes
    time_limit_s: float | None = None
    preemptible: bool = False
    owner: str | None = None

    @property
    def terms(self) -> tuple[object, ...]:
        return (self.wishes, self.time_limit_s, self.preemptible, self.owner)


# (is preemptible, -priority, seq, lease id): sorts, and is unique by its third part.
QueueKey = tuple[bool, int, int, str]


@dataclass(slots=True)
class LeaseQueue:
    _keys: list[QueueKey] = field(default_factory=list)
    # When each waiter asked, and its id; the first to come first.
    _arrivals: list[tuple[float, str]] = field(default_factory=list, compare=False)
    # The class of each waiter, and all of them by their terms.
    class_of: dict[str, RequestClass] = field(default_factory=dict, compare=False)
    _classes: dict[object, RequestClass] = field(default_factory=dict, compare=False)

    def join(self, lease: QueuedLease) -> None:
        """Join the queue behind all of the same or a higher priority."""
        own = self.class_of[lease.id] = self.class_for(lease.request)
        self._classes[own.terms] = own
        insort(self._keys, (*lease.order, lease.id))
        insort(self._arrivals, (lease.requested_at, lease.id))

    def leave(self, lease: QueuedLease) -> None:
        own = self.class_of.pop(lease.id)
        if own not in self.class_of.values():
            del self._classes[own.terms]
        del self._keys[self.place_of(lease) - 1]
        del self._arrivals[bisect_left(self._arrivals, (lease.requested_at, lease.id))]

    def class_for(self, request: Request) -> RequestClass:
        """The class of a request: the same as that of the waiters that are like it."""
        own = RequestClass(request.wishes, request.time_limit_s, request.preemptible, request.holder.owner)
        return self._classes.get(own.terms, own)

    def place_of(self, lease: QueuedLease) -> int:
        """The place by priority and arrival; 1 comes first."""
        return bisect_left(self._keys, (*lease.order, lease.id)) + 1

    def length_of(self, owner: str | None) -> int:
        return sum(each.owner == owner for each in self.class_of.values())

    @property
    def owners(self) -> set[str | None]:
        return {each.owner for each in self._classes.values()}

    @property
    def first_asked_at(self) -> float:
        """When the waiter that came first asked."""
        return self._arrivals[0][0]

    @property
    def keys(self) -> list[QueueKey]:
        return self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        """By priority and arrival."""
        return (lease_id for _, _, _, lease_id in self._keys)

    def __repr__(self) -> str:
        return f"<LeaseQueue: {len(self)} waiting, {len(self._classes)} classes>"
