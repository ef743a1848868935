"""The queue: one order over all waiters, and the same order within each line of waiters that are treated alike."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from typing import NamedTuple

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes

# (is preemptible, -priority, seq, lease id): sorts, and is unique by its third part.
QueueKey = tuple[bool, int, int, str]


class Line(NamedTuple):
    """All that decides whether a waiter can be served, apart from its place. `owner` is None where owners are treated
    alike.
    """

    wishes: Wishes
    time_limit_s: float | None
    preemptible: bool
    owner: str | None


class LeaseQueue:
    """`splits_owners`: owners are not treated alike, because there are quotas, bookings or a fair share."""

    def __init__(self) -> None:
        self.splits_owners = False
        self._keys: list[QueueKey] = []
        self._lines: dict[Line, list[QueueKey]] = {}
        self._by_owner: Counter[str | None] = Counter()
        self._by_process: dict[ProcessId, list[QueueKey]] = {}

    def line_of(self, lease: QueuedLease) -> Line:
        request = lease.request
        owner = request.holder.owner if self.splits_owners else None
        return Line(request.wishes, request.time_limit_s, request.preemptible, owner)

    def split_owners(self, is_split: bool, waiting: Iterable[QueuedLease]) -> None:  # noqa: FBT001 - it is the value
        """Line all waiters up again where that changes."""
        if is_split == self.splits_owners:
            return
        self.splits_owners = is_split
        self._lines = {}
        for lease in waiting:
            insort(self._lines.setdefault(self.line_of(lease), []), (*lease.order, lease.id))

    def join(self, lease: QueuedLease) -> None:
        """Join the queue behind all of the same or a higher priority."""
        queue_key = (*lease.order, lease.id)
        insort(self._keys, queue_key)
        insort(self._lines.setdefault(self.line_of(lease), []), queue_key)
        self._by_owner[lease.request.holder.owner] += 1
        if lease.request.holder.process is not None:
            insort(self._by_process.setdefault(lease.request.holder.process, []), queue_key)

    def leave(self, lease: QueuedLease) -> None:
        queue_key = (*lease.order, lease.id)
        del self._keys[bisect_left(self._keys, queue_key)]
        alike = self._lines[self.line_of(lease)]
        del alike[bisect_left(alike, queue_key)]
        if not alike:
            del self._lines[self.line_of(lease)]
        self._by_owner[lease.request.holder.owner] -= 1
        if not self._by_owner[lease.request.holder.owner]:
            del self._by_owner[lease.request.holder.owner]
        if (process := lease.request.holder.process) is not None:
            self._by_process[process].remove(queue_key)
            if not self._by_process[process]:
                del self._by_process[process]

    def place_of(self, lease: QueuedLease) -> int:
        """The place by priority and arrival; 1 comes first."""
        return bisect_left(self._keys, (*lease.order, lease.id)) + 1

    def length_of(self, owner: str | None) -> int:
        return self._by_owner[owner]

    @property
    def owners(self) -> KeysView[str | None]:
        return self._by_owner.keys()

    def of_process(self, process: ProcessId) -> Sequence[QueueKey]:
        return self._by_process.get(process, ())

    @property
    def processes(self) -> KeysView[ProcessId]:
        """The processes of waiters, where they are known."""
        return self._by_process.keys()

    @property
    def lines(self) -> Mapping[Line, Sequence[QueueKey]]:
        """The waiters of each line, in order."""
        return self._lines

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        """By priority and arrival."""
        return (lease_id for _, _, _, lease_id in self._keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeaseQueue) and self._keys == other._keys

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"<LeaseQueue: {len(self._keys)} waiting, {len(self._lines)} lines>"
