"""Whether a GPU may be granted to a request now, and if not, why (see verdicts.py)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.gpu_names import shown
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease
from gpu_worker_pool.core.model.outsiders import outside_use
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.model.slot import GpuSlot, is_used_by_leases_only, memory_use, used_percent
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.model.thresholds import Thresholds

from .verdicts import (
    Draining,
    Eligible,
    Excluded,
    Ineligible,
    InUseOutside,
    Leased,
    NoRoom,
    NotAmong,
    OtherNode,
    OtherServer,
    OverMemory,
    OverUtilization,
    ReadingStale,
    ReadingUnknown,
    SharersFull,
    TooSmall,
    Unhealthy,
    Verdict,
    WrongModel,
)

# More kinds of wishes than this are not looked at; then a waiter may be served.
_MOST_FAMILIES = 50


def judge(state: PoolState, slot: GpuSlot, wishes: Wishes, now: float) -> Verdict:
    """Judge one GPU for one request. Fixed obstacles come first, then leases, then readings."""
    thresholds = state.settings.thresholds_for(wishes)
    return (
        _unsuitable(state, slot, wishes, thresholds)
        or (_occupied(state, slot, wishes) if slot.occupants else None)
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


def may_serve_when_read(state: PoolState) -> bool:
    """Whether a waiter may be served once all GPUs are read. That cannot be if each asks for more of them than leases leave."""
    families = state.queue.families
    if len(families) > _MOST_FAMILIES:
        return True
    least = min((family.lines[0].wishes.gpus for family in families), default=0)
    return least == 1 or (least > 1 and next(islice(_left_by_leases(state), least - 1, None), None) is not None)


def _left_by_leases(state: PoolState) -> Iterator[GpuSlot]:
    """GPUs that a reading may show to be open: not those with as many active leases as they can have."""
    for slot in state.slots.values():
        occupants = slot.occupants
        if len(occupants) < state.settings.workers_per_gpu or occupants.draining or occupants.sharing:
            yield slot


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
    if slot.reading is None or not slot.reading.processes or not state.settings.avoids_outsiders(wishes):
        return None
    use = outside_use(slot, state.settings, state.ignored_processes)
    if use is None:
        return None
    first = use.processes[0]
    others = len(use.processes) - 1
    return InUseOutside(first.id.pid, first.user, first.name, use.memory_mb, use.utilization_percent, others)
