"""The queue: one order over all waiters, and the same order within each kind of wishes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, KeysView, Sequence

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes

# (-priority, seq, lease id): sorts, and is unique by its second part.
QueueKey = tuple[int, int, str]


class LeaseQueue:
    def __init__(self) -> None:
        self._keys: list[QueueKey] = []
        self._by_wishes: dict[Wishes, list[QueueKey]] = {}
        self._by_owner: Counter[str | None] = Counter()
        self._by_process: dict[ProcessId, list[QueueKey]] = {}

    def join(self, lease: QueuedLease) -> None:
        """Join the queue behind all of the same or a higher priority."""
        queue_key = (*lease.order, lease.id)
        insort(self._keys, queue_key)
        insort(self._by_wishes.setdefault(lease.request.wishes, []), queue_key)
        self._by_owner[lease.request.holder.owner] += 1
        if lease.request.holder.process is not None:
            insort(self._by_process.setdefault(lease.request.holder.process, []), queue_key)

    def leave(self, lease: QueuedLease) -> None:
        queue_key = (*lease.order, lease.id)
        del self._keys[bisect_left(self._keys, queue_key)]
        alike = self._by_wishes[lease.request.wishes]
        del alike[bisect_left(alike, queue_key)]
        if not alike:
            del self._by_wishes[lease.request.wishes]
        self._by_owner[lease.request.holder.owner] -= 1
        if not self._by_owner[lease.request.holder.owner]:
            del self._by_owner[lease.request.holder.owner]
        if (process := lease.request.holder.process) is not None:
            self._by_process[process].remove(queue_key)
            if not self._by_process[process]:
                del self._by_process[process]

    def position(self, lease: QueuedLease) -> int:
        """The queue position; 1 is served next."""
        return bisect_left(self._keys, (*lease.order, lease.id)) + 1

    def length_of(self, owner: str | None) -> int:
        return self._by_owner[owner]

    def of_process(self, process: ProcessId) -> Sequence[QueueKey]:
        return self._by_process.get(process, ())

    @property
    def processes(self) -> KeysView[ProcessId]:
        """The processes of waiters, where they are known."""
        return self._by_process.keys()

    @property
    def by_wishes(self) -> dict[Wishes, list[QueueKey]]:
        """The waiters of each kind of wishes, in order. The caller must not change it."""
        return self._by_wishes

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return (lease_id for _, _, lease_id in self._keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeaseQueue) and self._keys == other._keys

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"<LeaseQueue: {len(self._keys)} waiting, {len(self._by_wishes)} kinds of wishes>"
