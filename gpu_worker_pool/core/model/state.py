"""The state of a pool: what its events add up to. Only `evolve` changes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from gpu_worker_pool.core.queue.capacity import Capacity
from gpu_worker_pool.core.queue.inside import LeasesInside
from gpu_worker_pool.core.queue.waiting import LeaseQueue

from .deadlines import Deadlines
from .gpu import GpuKey, ProcessId
from .lease import ActiveLease, DrainingLease, EndedLease, Lease, LiveLease, QueuedLease
from .settings import PoolSettings
from .slot import GpuSlot


@dataclass(slots=True)
class PoolState:
    """Everything a decision is made from.

    `clock` is the latest time seen; it never goes back. `deadlines` has the due times of live leases: the TTL while
    queued or active, the drain limit while draining. An active lease of a local holder has none. Until `settled_until` no waiter except `newcomers` can be served
    unless an event happens, and `holds` says which GPUs are kept for which waiter; a change that may matter resets it.
    `capacity` is an index over the slots and can be rebuilt from them.
    """

    settings: PoolSettings = field(default_factory=PoolSettings)
    clock: float = -inf
    boot_id: str | None = None
    wall_offset_s: float = 0.0
    has_been_observed: bool = False
    slots: dict[GpuKey, GpuSlot] = field(default_factory=dict)
    leases: dict[str, LiveLease] = field(default_factory=dict)
    ended: dict[str, EndedLease] = field(default_factory=dict)
    queue: LeaseQueue = field(default_factory=LeaseQueue)
    # The leases inside other leases. They are in `leases` too, but not in `queue` and not on a slot.
    inside: LeasesInside = field(default_factory=LeasesInside)
    deadlines: Deadlines = field(default_factory=Deadlines)
    # The number of leases of each owner, waiting or active.
    owned: Counter[str | None] = field(default_factory=Counter)
    fences: dict[str, int] = field(default_factory=dict)
    next_seq: int = 1
    excluded: dict[GpuKey, str] = field(default_factory=dict)
    ignored_processes: set[str] = field(default_factory=set)
    settled_until: float = -inf
    holds: dict[GpuKey, str] = field(default_factory=dict)
    reserver: str | None = None
    newcomers: list[str] = field(default_factory=list)
    # GPUs that a process released and still holds memory on, with its leases that drain there.
    reclaimable: dict[ProcessId, dict[GpuKey, set[str]]] = field(default_factory=dict)
    touched: set[GpuKey] = field(default_factory=set, compare=False)
    capacity: Capacity = field(default_factory=Capacity, compare=False)

    def find(self, lease_id: str) -> Lease | None:
        return self.leases.get(lease_id) or self.ended.get(lease_id)

    def queued(self, lease_id: str) -> QueuedLease:
        lease = self.leases[lease_id]
        assert isinstance(lease, QueuedLease), lease  # noqa: S101 - a broken invariant must not go on
        return lease

    def position(self, lease: QueuedLease) -> int:
        """The position in the queue, or among the waiters inside the same lease; 1 is served next."""
        return (self.queue if lease.request.parent is None else self.inside).position(lease)

    def slot(self, key: GpuKey) -> GpuSlot:
        """The slot of a GPU, created on first mention: a journal names GPUs before their first reading."""
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots[key] = GpuSlot(key)
        return slot

    def forget_slot(self, key: GpuKey) -> None:
        del self.slots[key]
        self.touched.add(key)

    def touch(self, keys: Iterable[GpuKey]) -> None:
        """Mark these GPUs as changed; `reindex` updates the indexes."""
        self.touched.update(keys)

    def reindex(self) -> None:
        if not self.touched:
            return
        if self.capacity.refresh(self.touched, self.slots, self.settings, self.excluded, self.ignored_processes):
            self.unsettle()
        self.touched.clear()

    def unsettle(self) -> None:
        """Make the next pass go over the whole queue."""
        self.settled_until = -inf
        self.holds = {}
        self.reserver = None
        self.newcomers.clear()

    def __repr__(self) -> str:
        kinds = [type(lease) for lease in self.leases.values()]
        return (
            f"<PoolState: {len(self.slots)} GPUs, {kinds.count(ActiveLease)} active, "
            f"{kinds.count(DrainingLease)} draining, {len(self.queue)} queued>"
        )
