"""Whether a GPU may be granted to a request now, and if not, why.

A verdict is data (its fields) and a sentence (`str`). Answers, the command line and the page all show the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.gpu_names import shown
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease
from gpu_worker_pool.core.model.memory import show_mb
from gpu_worker_pool.core.model.outsiders import outside_use
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.model.settings import Thresholds
from gpu_worker_pool.core.model.slot import GpuSlot, is_used_by_leases_only, memory_use, used_percent
from gpu_worker_pool.core.model.state import PoolState


@dataclass(frozen=True, slots=True)
class Eligible:
    """The GPU may be granted. The lower the score (memory + utilization, in percent), the better."""

    code: ClassVar[str] = "eligible"
    score: float

    def __str__(self) -> str:
        return "available"


@dataclass(frozen=True, slots=True)
class Excluded:
    code: ClassVar[str] = "excluded"
    reason: str

    def __str__(self) -> str:
        return f"taken out of service: {self.reason}"


@dataclass(frozen=True, slots=True)
class OtherNode:
    code: ClassVar[str] = "other_node"
    wanted: str

    def __str__(self) -> str:
        return f"not on {self.wanted}"


@dataclass(frozen=True, slots=True)
class NotAmong:
    code: ClassVar[str] = "not_among"
    wanted: str

    def __str__(self) -> str:
        return f"not among the GPUs asked for: {self.wanted}"


@dataclass(frozen=True, slots=True)
class WrongModel:
    code: ClassVar[str] = "wrong_model"
    name: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.name}, not {self.wanted}"


@dataclass(frozen=True, slots=True)
class TooSmall:
    code: ClassVar[str] = "too_small"
    limit_mb: float
    asked_mb: float

    def __str__(self) -> str:
        return (
            f"too small: {show_mb(self.asked_mb)} asked, {show_mb(self.limit_mb)} below the memory threshold when empty"
        )


@dataclass(frozen=True, slots=True)
class Leased:
    code: ClassVar[str] = "leased"
    lease_ids: tuple[str, ...]
    holders: tuple[str, ...]
    since_at: float

    def __str__(self) -> str:
        return f"leased by {', '.join(dict.fromkeys(self.holders))}"


@dataclass(frozen=True, slots=True)
class Draining:
    """Its lease has ended, but processes of that lease may still be on it."""

    code: ClassVar[str] = "draining"
    lease_id: str
    pid: int | None
    memory_mb: float | None

    def __str__(self) -> str:
        if self.pid is None:
            return "just released; the next reading will tell whether it is free"
        held = "memory" if self.memory_mb is None else f"{self.memory_mb / 1024:.1f} GiB"
        return f"draining: pid {self.pid} still holds {held}"


@dataclass(frozen=True, slots=True)
class Unhealthy:
    code: ClassVar[str] = "unhealthy"
    fault: str

    def __str__(self) -> str:
        return f"unhealthy: {self.fault}"


@dataclass(frozen=True, slots=True)
class ReadingUnknown:
    code: ClassVar[str] = "reading_unknown"
    what: str

    def __str__(self) -> str:
        return f"its {self.what} is unknown"


@dataclass(frozen=True, slots=True)
class ReadingStale:
    code: ClassVar[str] = "reading_stale"
    age_s: float

    def __str__(self) -> str:
        return f"its last reading is {self.age_s:.0f} s old"


@dataclass(frozen=True, slots=True)
class OtherServer:
    """Another server on this machine grants it; `server` says which one, and how to use that."""

    code: ClassVar[str] = "other_server"
    server: str

    def __str__(self) -> str:
        return self.server


@dataclass(frozen=True, slots=True)
class InUseOutside:
    """A process outside the pool computes there or holds much memory. It is the one with the most memory; `others` are
    there too. `memory_mb` is that of all of them. Both numbers are None if they are unknown, or not theirs.
    """

    code: ClassVar[str] = "in_use_outside"
    pid: int
    user: str | None
    program: str | None
    memory_mb: float | None
    utilization_percent: float | None = None
    others: int = 0

    def __str__(self) -> str:
        who = f"{self.program or 'a process'}{f' of {self.user}' if self.user else ''} (pid {self.pid})"
        who += f" and {self.others} more" if self.others else ""
        held = "memory unknown" if self.memory_mb is None else f"{self.memory_mb / 1024:.1f} GiB"
        busy = "" if self.utilization_percent is None else f", {self.utilization_percent:.0f} % busy"
        return f"in use outside the pool: {who}, {held}{busy}"


@dataclass(frozen=True, slots=True)
class OverMemory:
    code: ClassVar[str] = "over_memory"
    memory_percent: float
    threshold_percent: float

    def __str__(self) -> str:
        return f"memory at {self.memory_percent:.1f} %, threshold {self.threshold_percent:g} %"


@dataclass(frozen=True, slots=True)
class OverUtilization:
    code: ClassVar[str] = "over_utilization"
    utilization_percent: float
    threshold_percent: float

    def __str__(self) -> str:
        return f"utilization at {self.utilization_percent:.0f} %, threshold {self.threshold_percent:g} %"


@dataclass(frozen=True, slots=True)
class NoRoom:
    code: ClassVar[str] = "no_room"
    committed_mb: float
    asked_mb: float
    limit_mb: float
    holders: tuple[str, ...] = ()

    def __str__(self) -> str:
        free_mb = max(self.limit_mb - self.committed_mb, 0.0)
        sharers = f", shared by {', '.join(dict.fromkeys(self.holders))}" if self.holders else ""
        return f"no room: {self.asked_mb:.0f} MB asked, {free_mb:.0f} MB of {self.limit_mb:.0f} MB left{sharers}"


@dataclass(frozen=True, slots=True)
class SharersFull:
    """As many leases share it as may. More would cost every decision time."""

    code: ClassVar[str] = "sharers_full"
    sharers: int
    limit: int

    def __str__(self) -> str:
        return f"shared by {self.sharers} leases, which is the limit for a GPU"


@dataclass(frozen=True, slots=True)
class HeldForAnother:
    """Reserved for a waiter further ahead, or about to be its own. Its start is `from_at`, if that is known."""

    code: ClassVar[str] = "held"
    for_lease_id: str
    for_holder: str
    from_at: float | None = None

    def __str__(self) -> str:
        return f"kept for {self.for_holder}, ahead in the queue"


@dataclass(frozen=True, slots=True)
class Booked:
    """Kept for an owner in a span of time; without an owner, out of service in it."""

    code: ClassVar[str] = "booked"
    booking_id: str
    owner: str | None
    starts_at: float
    ends_at: float | None
    reason: str

    def __str__(self) -> str:
        whom = f"booked for {self.owner}" if self.owner else "to be taken out of service"
        return f"{whom}: {self.reason}; a request with a time limit that ends before may have it"


@dataclass(frozen=True, slots=True)
class OverQuota:
    """The owner has its quota of GPUs. More are lent only for a time."""

    code: ClassVar[str] = "over_quota"
    held: float
    quota: int

    def __str__(self) -> str:
        return (
            f"its owner has {self.held:g} of {self.quota} GPUs; above the quota only requests with a time limit, or "
            f"preemptible ones, are served"
        )


@dataclass(frozen=True, slots=True)
class OverCeiling:
    code: ClassVar[str] = "over_ceiling"
    held: float
    ceiling: int

    def __str__(self) -> str:
        return f"its owner has {self.held:g} of at most {self.ceiling} GPU{'' if self.ceiling == 1 else 's'}"


Ineligible = (
    Excluded
    | OtherNode
    | NotAmong
    | WrongModel
    | TooSmall
    | Leased
    | Draining
    | Unhealthy
    | ReadingUnknown
    | ReadingStale
    | OtherServer
    | InUseOutside
    | OverMemory
    | OverUtilization
    | NoRoom
    | SharersFull
    | HeldForAnother
    | Booked
    | OverQuota
    | OverCeiling
)
Verdict = Eligible | Ineligible


def judge(state: PoolState, slot: GpuSlot, wishes: Wishes, now: float) -> Verdict:
    """Judge one GPU for one request. Fixed obstacles come first, then leases, then readings."""
    thresholds = state.settings.thresholds_for(wishes)
    return (
        _unsuitable(state, slot, wishes, thresholds)
        or _occupied(state, slot, wishes)
        or _unmeasured(state, slot, now)
        or _measured(state, slot, wishes, thresholds)
    )


def is_suitable(state: PoolState, slot: GpuSlot, wishes: Wishes) -> bool:
    """Whether a GPU would do, apart from its leases and readings."""
    return _unsuitable(state, slot, wishes, state.settings.thresholds_for(wishes)) is None


def _unsuitable(state: PoolState, slot: GpuSlot, wishes: Wishes, thresholds: Thresholds) -> Ineligible | None:
    if wishes.node is not None and slot.key.node != wishes.node:
        return OtherNode(wishes.node)
    reading = slot.reading
    if wishes.among is not None and reading is not None and slot.key not in state.capacity.named(wishes.among):
        return NotAmong(shown(wishes.among))
    excluded_because = state.excluded.get(slot.key)
    if excluded_because is not None:
        return Excluded(excluded_because)
    if reading is None:
        return None
    if reading.other_server is not None:
        return OtherServer(reading.other_server)
    if wishes.model is not None and not matches_model(wishes.model, reading.gpu.name):
        return WrongModel(reading.gpu.name, wishes.model)
    if wishes.memory_mb is not None and reading.memory_total_mb is not None:
        limit_mb = thresholds.memory_percent * reading.memory_total_mb / 100
        if wishes.memory_mb > limit_mb:
            return TooSmall(limit_mb, wishes.memory_mb)
    return None


def _occupied(state: PoolState, slot: GpuSlot, wishes: Wishes) -> Ineligible | None:
    if has_opening(state, slot, wishes):
        return None
    leases = [state.leases[lease_id] for lease_id in slot.occupants]
    draining = next((lease for lease in leases if isinstance(lease, DrainingLease)), None)
    # Active leases come before draining ones: a process may have reclaimed what it left there (reclaim.py).
    if draining is not None and has_opening(state, slot.without_draining(), wishes):
        return _draining(slot, draining)
    if wishes.is_shared and slot.is_shared and not slot.occupants.draining:
        return SharersFull(len(slot.occupants), state.settings.max_sharers)
    active = [lease for lease in leases if isinstance(lease, ActiveLease)]
    return Leased(
        tuple(lease.id for lease in active),
        tuple(lease.request.who for lease in active),
        min(lease.granted_at for lease in active),
    )


def has_opening(state: PoolState, slot: GpuSlot, wishes: Wishes) -> bool:
    settings = state.settings
    return slot.is_open_for(
        shared=wishes.is_shared, workers_per_gpu=settings.workers_per_gpu, max_sharers=settings.max_sharers
    )


def _draining(slot: GpuSlot, lease: DrainingLease) -> Draining:
    processes = (slot.reading.processes or ()) if slot.reading else ()
    left = set(slot.members.get(lease.id, ()))
    # The process with the most memory explains it best.
    weight_mb, pid = max(((p.memory_mb or 0.0, p.id.pid) for p in processes if p.id in left), default=(0.0, None))
    if pid is None and slot.members.get(lease.id):
        pid = slot.members[lease.id][0].pid
    return Draining(lease.id, pid, weight_mb or None)


def _unmeasured(state: PoolState, slot: GpuSlot, now: float) -> Ineligible | None:
    reading = slot.reading
    if reading is None:
        is_silent = state.epoch > 0 and slot.key.node not in state.announced
        return ReadingUnknown(f"box, {slot.key.node}, is not heard of, so its state" if is_silent else "state")
    if reading.fault is not None:
        return Unhealthy(reading.fault)
    if now > stale_at(state, reading):
        return ReadingStale(now - reading.at)
    return None


def stale_at(state: PoolState, reading: Reading) -> float:
    return reading.at + state.settings.stale_after_s


def _measured(state: PoolState, slot: GpuSlot, wishes: Wishes, thresholds: Thresholds) -> Verdict:
    reading = slot.reading
    percent = used_percent(slot, state.ignored_processes)
    utilization = reading.load_percent if reading else None
    if percent is None:
        return ReadingUnknown("memory")
    if utilization is None:
        return ReadingUnknown("utilization")
    if wishes.memory_mb is None:
        if outside := _outside(state, slot, wishes):
            return outside
        if percent >= thresholds.memory_percent:
            return OverMemory(percent, thresholds.memory_percent)
    else:
        use = memory_use(slot, state.ignored_processes)
        if use is None or reading is None or reading.memory_total_mb is None:
            return ReadingUnknown("memory size")
        limit_mb = thresholds.memory_percent * reading.memory_total_mb / 100
        if use.committed_mb + wishes.memory_mb > limit_mb:
            holders = tuple(state.leases[lease_id].request.who for lease_id in slot.occupants)
            return NoRoom(use.committed_mb, wishes.memory_mb, limit_mb, holders)
    if utilization >= thresholds.utilization_percent and not (
        # Sharing leases expect each other's load; only use from outside keeps them off a busy GPU.
        wishes.is_shared and is_used_by_leases_only(slot, state.ignored_processes)
    ):
        return OverUtilization(utilization, thresholds.utilization_percent)
    return Eligible(percent + utilization)


def _outside(state: PoolState, slot: GpuSlot, wishes: Wishes) -> InUseOutside | None:
    if not state.settings.avoids_outsiders(wishes):
        return None
    use = outside_use(slot, state.settings, state.ignored_processes)
    if use is None:
        return None
    first = use.processes[0]
    others = len(use.processes) - 1
    return InUseOutside(first.id.pid, first.user, first.name, use.memory_mb, use.utilization_percent, others)
