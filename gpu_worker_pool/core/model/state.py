"""The state of a pool: what its events add up to. Only `evolve` changes it; everybody else reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from gpu_worker_pool.core.queue.capacity import Capacity
from gpu_worker_pool.core.queue.waiting import LeaseQueue

from .deadlines import Deadlines
from .gpu import GpuKey, ProcessId
from .lease import ActiveLease, DrainingLease, EndedLease, Lease, LiveLease, QueuedLease
from .settings import PoolSettings
from .slot import GpuSlot


@dataclass(slots=True)
class PoolState:
    """Everything a decision is made from.

    `clock` is the latest time seen; time never goes back for a pool. `deadlines` notes when each live lease is due:
    its TTL while queued or active, the drain limit while draining. Until `settled_until` nobody in the queue can be
    served if nothing happens, but for `newcomers`, and `holds` says which GPUs are kept for whom; any change that might
    matter sets it back. `capacity` holds indexes over the slots: it can
    be rebuilt from them at any time and is no fact of its own.
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
    deadlines: Deadlines = field(default_factory=Deadlines)
    fences: dict[str, int] = field(default_factory=dict)
    next_seq: int = 1
    excluded: dict[GpuKey, str] = field(default_factory=dict)
    ignored_processes: set[str] = field(default_factory=set)
    settled_until: float = -inf
    holds: dict[GpuKey, str] = field(default_factory=dict)
    reserver: str | None = None
    newcomers: list[str] = field(default_factory=list)
    # GPUs that a process gave back and still holds memory on, with its leases that drain there.
    reclaimable: dict[ProcessId, dict[GpuKey, set[str]]] = field(default_factory=dict)
    touched: set[GpuKey] = field(default_factory=set, compare=False)
    capacity: Capacity = field(default_factory=Capacity, compare=False)

    def find(self, lease_id: str) -> Lease | None:
        """The lease as it is, live or remembered; None where the id is unknown."""
        return self.leases.get(lease_id) or self.ended.get(lease_id)

    def queued(self, lease_id: str) -> QueuedLease:
        """A lease that is known to be waiting."""
        lease = self.leases[lease_id]
        assert isinstance(lease, QueuedLease), lease  # noqa: S101 - a broken invariant must not go on
        return lease

    def slot(self, key: GpuKey) -> GpuSlot:
        """The slot of a GPU, made on first mention: a journal names GPUs before anybody has looked at them."""
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots[key] = GpuSlot(key)
        return slot

    def forget_slot(self, key: GpuKey) -> None:
        """Drop a GPU that nothing is known of."""
        del self.slots[key]
        self.touched.add(key)

    def touch(self, keys: Iterable[GpuKey]) -> None:
        """Something about these GPUs has changed; the indexes are brought up to date by `reindex`."""
        self.touched.update(keys)

    def reindex(self) -> None:
        """Bring the indexes up to date with the slots."""
        if not self.touched:
            return
        if self.capacity.refresh(self.touched, self.slots, self.settings, self.excluded, self.ignored_processes):
            self.unsettle()
        self.touched.clear()

    def unsettle(self) -> None:
        """Somebody in the queue might be served now."""
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
