"""The queue: all waiters by priority and arrival, each with the class of requests that it belongs to."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, KeysView
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


# (is preemptible, -priority, seq, lease id): sorts, and is unique by its third part.
QueueKey = tuple[bool, int, int, str]


@dataclass(slots=True)
class LeaseQueue:
    _keys: list[QueueKey] = field(default_factory=list)
    # When each waiter asked, and its id; the first to come first.
    _arrivals: list[tuple[float, str]] = field(default_factory=list, compare=False)
    # The class of each waiter.
    class_of: dict[str, RequestClass] = field(default_factory=dict, compare=False)
    # With the number of waiters that have it, by its terms and owner.
    _classes: dict[object, tuple[RequestClass, int]] = field(default_factory=dict, compare=False)
    _of_owner: Counter[str | None] = field(default_factory=Counter, compare=False)

    def join(self, lease: QueuedLease) -> None:
        """Join the queue behind all of the same or a higher priority."""
        own_class = self.class_of[lease.id] = self.class_for(lease.request)
        self._count(own_class, 1)
        insort(self._keys, (*lease.order, lease.id))
        insort(self._arrivals, (lease.requested_at, lease.id))

    def leave(self, lease: QueuedLease) -> None:
        self._count(self.class_of.pop(lease.id), -1)
        del self._keys[bisect_left(self._keys, (*lease.order, lease.id))]
        del self._arrivals[bisect_left(self._arrivals, (lease.requested_at, lease.id))]

    def _count(self, own: RequestClass, change: int) -> None:
        """Count one waiter of this class more, or less. A class without waiters is forgotten."""
        key = (own.wishes, own.time_limit_s, own.preemptible, own.owner)
        _, number = self._classes.pop(key, (own, 0))
        if number + change:
            self._classes[key] = (own, number + change)
        self._of_owner[own.owner] += change
        if not self._of_owner[own.owner]:
            del self._of_owner[own.owner]

    def class_for(self, request: Request) -> RequestClass:
        """The class of a request: the same as that of the waiters that are like it."""
        terms = (request.wishes, request.time_limit_s, request.preemptible, request.holder.owner)
        known = self._classes.get(terms)
        return RequestClass(*terms) if known is None else known[0]

    def place_of(self, lease: QueuedLease) -> int:
        """The place by priority and arrival; 1 comes first."""
        return bisect_left(self._keys, (*lease.order, lease.id)) + 1

    def length_of(self, owner: str | None) -> int:
        return self._of_owner.get(owner, 0)

    @property
    def classes(self) -> Iterator[RequestClass]:
        return (request_class for request_class, _ in self._classes.values())

    @property
    def owners(self) -> KeysView[str | None]:
        return self._of_owner.keys()

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
