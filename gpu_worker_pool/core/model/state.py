"""The state of a pool: what its events add up to. Only `evolve` changes it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf, log, nextafter

from .configured import ALL, AccessToken, Booking, Group, Quota
from .facts import PoolFacts
from .gpu import GpuKey, Node
from .lease import ActiveLease, EndedLease, Lease, LeaseUse, QueuedLease, Reservation
from .settings import PoolSettings
from .slot import GpuSlot
from .waiting import LeaseQueue

HALF_LIFE_S = 7 * 24 * 3600.0
RECENT_LEASES = 2
_FADES_S = HALF_LIFE_S / log(2)


@dataclass(slots=True)
class Deadlines:
    """When each lease is due. A lease need not have a deadline."""

    _due_at: dict[str, float] = field(default_factory=dict)

    def set(self, id_: str, due_at: float) -> None:
        self._due_at[id_] = due_at

    def drop(self, id_: str) -> None:
        self._due_at.pop(id_, None)

    def due_at(self, id_: str) -> float | None:
        """The due time; None if there is none."""
        return self._due_at.get(id_)

    def due(self, now: float) -> list[str]:
        """Ids that are due, longest overdue first."""
        return [id_ for _, id_ in sorted((due_at, id_) for id_, due_at in self._due_at.items() if due_at <= now)]

    def next_due_at(self) -> float:
        """The earliest due time; infinite if there are no ids."""
        return min(self._due_at.values(), default=inf)


@dataclass(slots=True)
class OwnerUse:
    """What one owner used and holds, in thousandths of a GPU times seconds: owners that used little are served first. `firm` is the
    part of `held` that is not preemptible. `recent` are the seconds that the owner's last leases lasted.

    Use fades: GPU time counts half after a half-life. What an owner holds now counts as it runs, so a lease of a month does not
    look idle until it ends.
    """

    used: float = 0.0
    as_of: float = 0.0
    held: int = 0
    firm: int = 0
    recent: tuple[float, ...] = ()

    def used_at(self, now: float) -> float:
        """The faded use: what it was, and what has been held since."""
        if now <= self.as_of:
            return self.used
        left = float(2.0 ** (-(now - self.as_of) / HALF_LIFE_S))
        return self.used * left + self.held * _FADES_S * (1.0 - left)

    def hold(self, weight: int, now: float, *, is_firm: bool) -> None:
        """Hold this much more from now on, or less."""
        self.used, self.as_of = self.used_at(now), max(now, self.as_of)
        self.held += weight
        self.firm += weight if is_firm else 0

    def remember(self, lasted_s: float) -> None:
        self.recent = (*self.recent, lasted_s)[-RECENT_LEASES:]


@dataclass(slots=True)
class PoolState:
    """Everything a decision is made from.

    `clock` is the latest time seen; it never goes back. TTLs run on *live time*, which is the clock less `lost_s`: it stands
    still while the driver is away. Until `settled_until` no waiter can be served unless an event happens. `facts` can be
    derived from the slots.
    """

    settings: PoolSettings = field(default_factory=PoolSettings)
    clock: float = -inf
    lost_s: float = 0.0
    # The last take-over: its time, and as in the event TakenOver.
    taken_over: float = -inf
    epoch: int = 0
    boot_id: str | None = None
    clock_base: float = 0.0
    wall_offset_s: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    # The nodes that have announced themselves since.
    announced: set[str] = field(default_factory=set)
    slots: dict[GpuKey, GpuSlot] = field(default_factory=dict)
    # Those that wait, are active or drain. The others have ended; the oldest of them are forgotten first.
    leases: dict[str, Lease] = field(default_factory=dict)
    ended: OrderedDict[str, EndedLease] = field(default_factory=OrderedDict)
    queue: LeaseQueue = field(default_factory=LeaseQueue)
    # On live time: the TTL of a lease while it waits or is active, its drain limit while it drains; until a grant is taken up,
    # the time for that. Else an active lease of a local holder has none, nor has one in a fleet (an epoch above 0): its box
    # counts its TTL.
    ttl_due: Deadlines = field(default_factory=Deadlines)
    # When active leases are to be warned or ended.
    limit_due: Deadlines = field(default_factory=Deadlines)
    # The grants that their clients have not taken up. The waiters whose clients have left, or have not called since the
    # take-over. The waiters that are passed over until their clients call: they did not take a grant up.
    untaken: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    passed_over: set[str] = field(default_factory=set)
    # The number of leases of each owner, waiting or active.
    live_count: Counter[str | None] = field(default_factory=Counter)
    # What each owner uses, and how long the last leases of the pool lasted.
    usage: dict[str | None, OwnerUse] = field(default_factory=dict)
    last_durations_s: tuple[float, ...] = ()
    # What the active leases were seen to use since they were granted, and when that was last written.
    lease_uses: dict[str, LeaseUse] = field(default_factory=dict, compare=False)
    measured: float = field(default=-inf, compare=False)
    # What operators have set (see configured.py).
    excluded: dict[GpuKey, str] = field(default_factory=dict)
    new_gpus: dict[str, str] = field(default_factory=dict)
    ignored_processes: dict[str, str] = field(default_factory=dict)
    quotas: dict[str, Quota] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    tokens: dict[str, AccessToken] = field(default_factory=dict)
    bookings: dict[str, Booking] = field(default_factory=dict)
    # The active leases that may be preempted, and those of them that were told to make room for others.
    preemptible: set[str] = field(default_factory=set)
    preempt_warned: set[str] = field(default_factory=set)
    fences: dict[str, int] = field(default_factory=dict)
    next_seq: int = 1
    settled_until: float = -inf
    reservation: Reservation | None = None
    # GPUs that will be a waiter's, because leases on them are being preempted for it.
    claims: dict[GpuKey, str] = field(default_factory=dict)
    touched: set[GpuKey] = field(default_factory=set, compare=False)
    facts: PoolFacts = field(default_factory=PoolFacts, compare=False)

    def find(self, lease_id: str) -> Lease | None:
        return self.leases.get(lease_id) or self.ended.get(lease_id)

    def queued(self, lease_id: str) -> QueuedLease:
        lease = self.leases[lease_id]
        assert isinstance(lease, QueuedLease), lease  # noqa: S101 - a broken invariant must not go on
        return lease

    def active(self, lease_id: str) -> ActiveLease:
        lease = self.leases[lease_id]
        assert isinstance(lease, ActiveLease), lease  # noqa: S101 - a broken invariant must not go on
        return lease

    def slot(self, key: GpuKey) -> GpuSlot:
        """The slot of a GPU, created on first mention: a journal names GPUs before their first reading."""
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots[key] = GpuSlot(key)
            if (reason := self.new_gpus.get(*ALL)) is not None:
                self.excluded.setdefault(key, reason)
        return slot

    def slots_on(self, node: str | None) -> Collection[GpuSlot]:
        """The GPUs of a node, or all."""
        if node is None:
            return self.slots.values()
        return [self.slots[key] for key in self.facts.nodes[node].gpus] if node in self.facts.nodes else []

    def forget_slot_if_unknown(self, slot: GpuSlot) -> None:
        """Forget a GPU that has no lease, no reading and no place in the inventory."""
        if not slot.occupants and slot.reading is None and slot.installed is None:
            del self.slots[slot.key]
            self.touched.add(slot.key)

    def touch(self, keys: Iterable[GpuKey]) -> None:
        """Mark these GPUs as changed: their facts are derived again after the events of a step."""
        self.touched.update(keys)

    def refresh_facts(self) -> None:
        if self.touched:
            known = (self.slots, self.settings, self.excluded, self.ignored_processes)
            if self.facts.refresh(self.touched, *known) and not self._has_nothing_to_settle:
                self.unsettle()
            self.touched.clear()

    def unsettle(self) -> None:
        """Make the next step serve the queue."""
        self.settled_until = -inf

    def is_settled_at(self, now: float) -> bool:
        """Whether a pass over the queue would find nothing."""
        return self._has_nothing_to_settle or max(now, self.clock) <= self.settled_until

    @property
    def _has_nothing_to_settle(self) -> bool:
        """Whether there is no waiter, no booking that begins, and no lease that need not make room any more."""
        return not (len(self.queue) or self.bookings or self.preempt_warned)

    def span_of(self, booking: Booking) -> tuple[float, float]:
        """When a booking begins and ends, on the pool's clock."""
        ends_at = inf if booking.ends_at is None else booking.ends_at
        return booking.starts_at - self.wall_offset_s, ends_at - self.wall_offset_s

    def live(self, now: float) -> float:
        """The live time at this time of the clock."""
        return now - self.lost_s

    def restart_ttl(self, lease: Lease, at: float) -> None:
        """Give a lease its full TTL from this time on, or its drain limit: it counts as taken up. In a fleet the box of an
        active lease counts its TTL.
        """
        self.untaken.discard(lease.id)
        limit_s: float | None
        if isinstance(lease, EndedLease):
            limit_s = self.settings.drain_limit_s
        elif self.epoch > 0 and isinstance(lease, ActiveLease):
            limit_s = None
        else:
            limit_s = lease.ttl_s
        if limit_s is None:
            self.ttl_due.drop(lease.id)
        else:
            self.ttl_due.set(lease.id, self.live(at) + limit_s)

    def expires_at(self, lease_id: str) -> float | None:
        """When a lease expires without a heartbeat; None if it does not. In a fleet the box of an active lease counts its
        heartbeats: then this is the earliest time.
        """
        due_at, lease = self.ttl_due.due_at(lease_id), self.leases.get(lease_id)
        if due_at is not None:
            return due_at + self.lost_s
        if not isinstance(lease, ActiveLease) or (lease.ttl_s is None and not self.epoch):
            return None
        slot = self.slots.get(lease.gpus[0])
        occupant = None if slot is None else slot.occupants.get(lease_id)
        since = -inf if occupant is None else occupant.since
        # Its TTL began after the grant. A lease from before the take-over, or one that a box brought back, may have expired
        # there since.
        is_brought_back = abs(since + self.wall_offset_s - lease.granted_at) > 0.001
        if lease.ttl_s is not None:
            return -inf if is_brought_back else since + lease.ttl_s
        # A database that lost commits may have a grant that was withdrawn: its box knows, and says so when it announces itself.
        is_sure = since > -inf or all(key.node in self.announced for key in lease.gpus)
        return None if is_sure else -inf

    def has_due(self, now: float) -> bool:
        """Whether a `Tick` may bring something about. Bookings do so at times of their own."""
        now = max(now, self.clock)
        is_expired = self.ttl_due.next_due_at() <= self.live(now)
        return bool(self.bookings) or is_expired or self.limit_due.next_due_at() <= now

    def next_due_at(self) -> float:
        """When something is due though no command comes."""
        # It is settled up to and including that time.
        due_at = inf if self._has_nothing_to_settle else nextafter(self.settled_until, inf)
        expiry = self.ttl_due.next_due_at()
        expires_at = expiry + self.lost_s
        # A rounded sum may be a little too early: then nothing would be due at that time.
        if self.live(expires_at) < expiry:
            expires_at = nextafter(expires_at, inf)
        return min(due_at, expires_at, self.limit_due.next_due_at())

    def __repr__(self) -> str:
        kinds = [type(lease) for lease in self.leases.values()]
        return (
            f"<PoolState: {len(self.slots)} GPUs, {kinds.count(ActiveLease)} active, "
            f"{kinds.count(EndedLease)} draining, {len(self.queue)} queued>"
        )
