"""The state of a pool: what its events add up to. Only `evolve` changes it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf, nextafter

from gpu_worker_pool.core.accounting.fair_share import OwnerUse
from gpu_worker_pool.core.queue.capacity import Capacity
from gpu_worker_pool.core.queue.inside import LeasesInside
from gpu_worker_pool.core.queue.waiting import LeaseQueue

from .access_token import AccessToken
from .booking import Booking
from .deadlines import Deadlines
from .gpu import GpuKey, ProcessId
from .lease import ActiveLease, DrainingLease, EndedLease, Lease, LiveLease, QueuedLease
from .node import Node
from .quota import Quota
from .request import Wishes
from .reservation import Reservation
from .settings import PoolSettings
from .slot import GpuSlot


@dataclass(slots=True)
class PoolState:
    """Everything a decision is made from.

    `clock` is the latest time seen; it never goes back. `deadlines` has the due times of live leases, in live time
    (`live`): the TTL while queued or active, the drain limit while draining. An active lease of a local holder has none, nor has one in a fleet
    (an epoch above 0): its box counts its TTL. `timetable` has the
    times at which active leases are to be warned or ended. Until `settled_until` no waiter except `newcomers` can be
    served unless an event happens; a change that may matter resets it. `capacity` is an index over the slots and can be
    rebuilt from them.
    """

    settings: PoolSettings = field(default_factory=PoolSettings)
    clock: float = -inf
    # The last take-over: its time, and as in the event TakenOver.
    taken_over: float = -inf
    epoch: int = 0
    boot_id: str | None = None
    clock_base: float = 0.0
    wall_offset_s: float = 0.0
    # The time since then in which the driver was away, and could read no heartbeat.
    lost_s: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    # The nodes that have announced themselves since.
    announced: set[str] = field(default_factory=set)
    slots: dict[GpuKey, GpuSlot] = field(default_factory=dict)
    leases: dict[str, LiveLease] = field(default_factory=dict)
    # The oldest are forgotten first. To find the first of a plain dict takes the longer the more of them were removed.
    ended: OrderedDict[str, EndedLease] = field(default_factory=OrderedDict)
    queue: LeaseQueue = field(default_factory=LeaseQueue)
    # The leases inside other leases. They are in `leases` too, but not in `queue` and not on a slot.
    inside: LeasesInside = field(default_factory=LeasesInside)
    deadlines: Deadlines = field(default_factory=Deadlines)
    timetable: Deadlines = field(default_factory=Deadlines)
    # The number of leases of each owner, waiting or active.
    owned: Counter[str | None] = field(default_factory=Counter)
    # What each owner uses, and how long the last leases of the pool lasted.
    owners: dict[str | None, OwnerUse] = field(default_factory=dict)
    recent: tuple[float, ...] = ()
    quotas: dict[str, Quota] = field(default_factory=dict)
    # By their digests.
    tokens: dict[str, AccessToken] = field(default_factory=dict)
    bookings: dict[str, Booking] = field(default_factory=dict)
    # The active leases that may be preempted.
    preemptible: set[str] = field(default_factory=set)
    # Those of them that were told to make room for others.
    making_room: set[str] = field(default_factory=set)
    fences: dict[str, int] = field(default_factory=dict)
    next_seq: int = 1
    excluded: dict[GpuKey, str] = field(default_factory=dict)
    # Why GPUs that are first seen now are out of service; None if they are not.
    new_gpus_excluded: str | None = None
    ignored_processes: set[str] = field(default_factory=set)
    settled_until: float = -inf
    reservation: Reservation | None = None
    # GPUs that will be a waiter's, because leases on them are being preempted for it.
    claims: dict[GpuKey, str] = field(default_factory=dict)
    # Wishes for which nothing can be reserved, and until when that is not tried again.
    undated: dict[Wishes, float] = field(default_factory=dict)
    newcomers: list[str] = field(default_factory=list)
    # GPUs that a process released and still holds memory on, with its leases that drain there.
    reclaimable: dict[ProcessId, dict[GpuKey, set[str]]] = field(default_factory=dict)
    touched: set[GpuKey] = field(default_factory=set, compare=False)
    capacity: Capacity = field(default_factory=Capacity, compare=False)

    def __post_init__(self) -> None:
        self.line_up()

    def find(self, lease_id: str) -> Lease | None:
        return self.leases.get(lease_id) or self.ended.get(lease_id)

    def queued(self, lease_id: str) -> QueuedLease:
        lease = self.leases[lease_id]
        assert isinstance(lease, QueuedLease), lease  # noqa: S101 - a broken invariant must not go on
        return lease

    def slot(self, key: GpuKey) -> GpuSlot:
        """The slot of a GPU, created on first mention: a journal names GPUs before their first reading."""
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots[key] = GpuSlot(key)
            if self.new_gpus_excluded is not None:
                self.excluded.setdefault(key, self.new_gpus_excluded)
        return slot

    def slots_on(self, node: str | None) -> Collection[GpuSlot]:
        """The GPUs of a node, or all."""
        if node is None:
            return self.slots.values()
        return [self.slots[key] for key in self.capacity.gpus_of(node)] if node in self.capacity.nodes else []

    def slots_for(self, wishes: Wishes) -> Collection[GpuSlot]:
        """The GPUs that a request considers: those of its node, or all."""
        return self.slots_on(wishes.node)

    def forget_slot_if_unknown(self, slot: GpuSlot) -> None:
        """Forget a GPU that has no lease, no reading and no place in the inventory."""
        if not slot.occupants and slot.reading is None and slot.installed is None:
            del self.slots[slot.key]
            self.touched.add(slot.key)
            self.unsettle()  # one that has never been read is no longer waited for

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
        self.newcomers.clear()

    def is_settled_at(self, now: float) -> bool:
        """Whether a pass over the queue would find nothing."""
        if self.newcomers or self.inside.unsettled or max(now, self.clock) > self.settled_until:
            return False
        may_reclaim = self.reclaimable or self.capacity.used_outside_by
        return not (may_reclaim and len(self.queue))

    def line_up(self) -> None:
        """Line the waiters up by owner if owners are not treated alike."""
        is_split = bool(self.settings.fair_share or self.quotas or any(b.owner for b in self.bookings.values()))
        self.queue.split_owners(is_split, [self.queued(lease_id) for lease_id in self.queue])
        self.unsettle()

    def live(self, now: float) -> float:
        """The live time: it does not advance while the driver is away."""
        return now - self.lost_s

    def restart_deadline(self, lease: LiveLease, at: float) -> None:
        """Give a lease its full TTL from this time on, or its drain limit. In a fleet the box of an active lease counts
        its TTL.
        """
        limit_s: float | None
        if isinstance(lease, DrainingLease):
            limit_s = self.settings.drain_limit_s
        elif self.epoch > 0 and isinstance(lease, ActiveLease):
            limit_s = None
        else:
            limit_s = lease.ttl_s
        if limit_s is None:
            self.deadlines.drop(lease.id)
        else:
            self.deadlines.set(lease.id, self.live(at) + limit_s)

    def expires_at(self, lease_id: str) -> float | None:
        """When a lease expires without a heartbeat; None if it does not. In a fleet the box of an active lease counts its
        heartbeats: then this is the earliest time.
        """
        due_at, lease = self.deadlines.due_at(lease_id), self.leases.get(lease_id)
        if due_at is not None:
            return due_at + self.lost_s
        if not isinstance(lease, ActiveLease) or lease.ttl_s is None:
            return None
        slot = self.slots.get(lease.gpus[0])
        occupant = None if slot is None else slot.occupants.get(lease_id)
        since = -inf if occupant is None else occupant.since
        # Its TTL began after the grant. A lease from before the take-over, or one that a box brought back, may have expired
        # there since.
        is_brought_back = abs(since + self.wall_offset_s - lease.granted_at) > 0.001
        return -inf if is_brought_back else since + lease.ttl_s

    def has_due(self, now: float) -> bool:
        """Whether a `Tick` may bring something about. Bookings do so at times of their own."""
        now = max(now, self.clock)
        expiry, warning = self.deadlines.next_due_at(), self.timetable.next_due_at()
        is_expired = expiry is not None and expiry <= self.live(now)
        return bool(self.bookings) or is_expired or (warning is not None and warning <= now)

    def next_due_at(self) -> float:
        """When something is due though no command comes."""
        # It is settled up to and including that time.
        due_at = nextafter(self.settled_until, inf)
        expiry, warning = self.deadlines.next_due_at(), self.timetable.next_due_at()
        if expiry is not None:
            due_at = min(due_at, expiry + self.lost_s)
        return due_at if warning is None else min(due_at, warning)

    def __repr__(self) -> str:
        kinds = [type(lease) for lease in self.leases.values()]
        return (
            f"<PoolState: {len(self.slots)} GPUs, {kinds.count(ActiveLease)} active, "
            f"{kinds.count(DrainingLease)} draining, {len(self.queue)} queued>"
        )
