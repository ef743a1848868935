"""An index of the leases inside other leases: which wait inside which lease, and which use its GPUs."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence

from gpu_worker_pool.core.model.lease import ActiveLease, QueuedLease

from .waiting import QueueKey


class LeasesInside:
    """The sub-leases of each lease. They do not stand in the pool's queue and take no place on a GPU.

    `unsettled` are the leases inside which a waiter may have become servable since the last look.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[QueueKey]] = {}
        self._active: dict[str, set[str]] = {}
        self.unsettled: set[str] = set()

    def join(self, lease: QueuedLease) -> None:
        """Wait inside the parent, behind all of the same or a higher priority."""
        parent = _parent_of(lease)
        insort(self._waiting.setdefault(parent, []), (*lease.order, lease.id))
        self.unsettled.add(parent)

    def enter(self, waited: QueuedLease) -> None:
        """Stop waiting and use GPUs of the parent."""
        self.leave(waited)
        self._active.setdefault(_parent_of(waited), set()).add(waited.id)

    def leave(self, lease: QueuedLease | ActiveLease) -> None:
        parent = _parent_of(lease)
        if isinstance(lease, ActiveLease):
            self._active[parent].remove(lease.id)
            if not self._active[parent]:
                del self._active[parent]
        else:
            line = self._waiting[parent]
            del line[bisect_left(line, (*lease.order, lease.id))]
            if not line:
                del self._waiting[parent]
        self.unsettled.add(parent)

    def settle(self, parents: Iterable[str]) -> None:
        self.unsettled.difference_update(parents)

    def unsettle(self) -> None:
        """Look at all waiters again: GPUs were read that had not been read before."""
        self.unsettled.update(self._waiting)

    def waiting_in(self, parent: str) -> Sequence[QueueKey]:
        return self._waiting.get(parent, ())

    def active_in(self, parent: str) -> Collection[str]:
        return self._active.get(parent, ())

    def position(self, lease: QueuedLease) -> int:
        """The position among the waiters inside the same lease; 1 is served next."""
        return bisect_left(self._waiting[_parent_of(lease)], (*lease.order, lease.id)) + 1

    def __bool__(self) -> bool:
        """Whether there are any, waiting or active."""
        return bool(self._waiting or self._active)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[str]:
        """The waiters, those inside the same lease in order."""
        return (queue_key[-1] for line in self._waiting.values() for queue_key in line)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeasesInside) and (self._waiting, self._active) == (other._waiting, other._active)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"<LeasesInside: {len(self)} waiting, {sum(map(len, self._active.values()))} active>"


def _parent_of(lease: QueuedLease | ActiveLease) -> str:
    parent = lease.request.parent
    assert parent is not None, lease  # noqa: S101 - a broken invariant must not go on
    return parent
