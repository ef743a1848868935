"""Whether a GPU may be granted to a request now, and if not, why (see verdicts.py)."""

from __future__ import annotations

from gpu_worker_pool.core.model.bounds import Thresholds, show_mb
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease
from gpu_worker_pool.core.model.request import Request, Wishes, matches_model
from gpu_worker_pool.core.model.slot import (
    GpuSlot,
    is_used_by_leases_only,
    memory_use,
    outside_use,
    read_without,
    used_percent,
)
from gpu_worker_pool.core.model.state import PoolState

from .verdicts import Verdict, verdict


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


def as_left_to(state: PoolState, slot: GpuSlot, request: Request) -> GpuSlot | None:
    """A GPU as it is for the process that uses it alone, without what that process has left there; None if another uses it.

    A program with several workers releases a GPU and asks for one again, while its memory stays allocated: frameworks keep
    what they once allocated. For all other processes that GPU drains, and after the drain limit it is in use outside the
    pool; for the same process it is usable.
    """
    holder = request.holder
    if holder.process_on(slot.key.node) is None or request.wishes.total_gpus != 1:
        return None
    if slot.occupants:
        # A client may claim any pid; that must not give it what another owner left.
        if any(state.leases[lease_id].request.holder.owner != holder.owner for lease_id in slot.occupants):
            return None
        own = {member for members in slot.members.values() for member in members}
    else:
        use = outside_use(slot, state.settings, state.ignored_processes)
        if use is None or any(
            None not in (found.user, holder.owner) and found.user != holder.owner for found in use.processes
        ):
            return None
        own = {found.id for found in use.processes}
    reading = slot.reading
    if reading is None or reading.processes is None or not own:
        return GpuSlot(slot.key, reading)
    # With no other process on the GPU, the load is the waiter's own.
    is_alone = all(found.id in own for found in reading.processes)
    return GpuSlot(slot.key, read_without(reading, own, 0.0 if is_alone else reading.utilization_percent))


def _unsuitable(state: PoolState, slot: GpuSlot, wishes: Wishes, thresholds: Thresholds) -> Verdict | None:
    if wishes.node is not None and slot.key.node != wishes.node:
        return verdict("other_node", wanted=wishes.node)
    reading = slot.reading
    named = None if reading is None else state.facts.named(wishes)
    if named is not None and slot.key not in named:
        return verdict("not_among", wanted=wishes.named)
    excluded_because = state.excluded.get(slot.key)
    if excluded_because is not None:
        return verdict("excluded", reason=excluded_because)
    if reading is None:
        return None
    if reading.other_server is not None:
        return verdict("other_server", server=reading.other_server)
    if wishes.model is not None and not matches_model(wishes.model, reading.gpu.name):
        return verdict("wrong_model", name=reading.gpu.name, wanted=wishes.model)
    total_mb = reading.memory_total_mb
    if wishes.min_memory_mb is not None and total_mb is None:
        return verdict("reading_unknown", what="memory size")
    if wishes.min_memory_mb is not None and total_mb is not None and not wishes.is_large_enough(total_mb):
        wanted = f"{show_mb(wishes.min_memory_mb)} or more"
        return verdict("too_small", limit_mb=total_mb, asked_mb=wishes.min_memory_mb, wanted=wanted)
    if wishes.memory_mb is not None and total_mb is not None:
        limit_mb = thresholds.memory_percent * total_mb / 100
        if wishes.memory_mb > limit_mb:
            return verdict("too_small", limit_mb=limit_mb, asked_mb=wishes.memory_mb)
    return None


def _occupied(state: PoolState, slot: GpuSlot, wishes: Wishes) -> Verdict | None:
    if has_opening(state, slot, wishes):
        return None
    leases = [state.leases[lease_id] for lease_id in slot.occupants]
    draining = next((lease for lease in leases if isinstance(lease, EndedLease)), None)
    # Active leases come before draining ones: a process may have taken again what it left there.
    if draining is not None and has_opening(state, slot.without_draining(), wishes):
        return _draining(slot, draining)
    if wishes.is_shared and slot.is_shared and not slot.is_draining:
        return verdict("sharers_full", sharers=len(slot.occupants), limit=state.settings.max_sharers)
    active = [lease for lease in leases if isinstance(lease, ActiveLease)]
    return verdict(
        "leased",
        lease_ids=tuple(lease.id for lease in active),
        holders=tuple(lease.request.who for lease in active),
        since_at=min(lease.granted_at for lease in active),
    )


def has_opening(state: PoolState, slot: GpuSlot, wishes: Wishes) -> bool:
    return slot.is_open_for(shared=wishes.is_shared, max_sharers=state.settings.max_sharers)


def may_serve_when_read(state: PoolState) -> bool:
    """Whether a waiter may be served once all GPUs are read. That cannot be if each asks for more of them than leases leave."""
    least = min((each.wishes.gpus for each in state.queue.class_of.values()), default=0)
    left = (slot for slot in state.slots.values() if not slot.occupants or slot.is_draining or slot.is_shared)
    return least == 1 or (least > 1 and sum(1 for _ in left) >= least)


def _draining(slot: GpuSlot, lease: EndedLease) -> Verdict:
    processes = (slot.reading.processes or ()) if slot.reading else ()
    left = set(slot.members.get(lease.id, ()))
    # The process with the most memory explains it best.
    weight_mb, pid = max(((p.memory_mb or 0.0, p.id.pid) for p in processes if p.id in left), default=(0.0, None))
    if pid is None and slot.members.get(lease.id):
        pid = slot.members[lease.id][0].pid
    return verdict("draining", lease_id=lease.id, pid=pid, memory_mb=weight_mb or None)


def _unmeasured(state: PoolState, slot: GpuSlot, now: float) -> Verdict | None:
    reading = slot.reading
    if reading is None:
        is_silent = state.epoch > 0 and slot.key.node not in state.announced
        what = f"box, {slot.key.node}, is not heard of, so its state" if is_silent else "state"
        return verdict("reading_unknown", what=what)
    if reading.fault is not None:
        return verdict("unhealthy", fault=reading.fault)
    if now > stale_at(state, reading):
        return verdict("reading_stale", age_s=now - reading.at)
    return None


def stale_at(state: PoolState, reading: Reading) -> float:
    return reading.at + state.settings.stale_after_s


def _measured(state: PoolState, slot: GpuSlot, wishes: Wishes, thresholds: Thresholds) -> Verdict:
    reading = slot.reading
    percent = used_percent(slot, state.ignored_processes)
    utilization = reading.load_percent if reading else None
    if percent is None:
        return verdict("reading_unknown", what="memory")
    if utilization is None:
        return verdict("reading_unknown", what="utilization")
    if wishes.memory_mb is None:
        if outside := _outside(state, slot, wishes):
            return outside
        if percent >= thresholds.memory_percent:
            return verdict("over_memory", memory_percent=percent, threshold_percent=thresholds.memory_percent)
    else:
        use = memory_use(slot, state.ignored_processes)
        if use is None or reading is None or reading.memory_total_mb is None:
            return verdict("reading_unknown", what="memory size")
        limit_mb = thresholds.memory_percent * reading.memory_total_mb / 100
        if use.committed_mb + wishes.memory_mb > limit_mb:
            holders = tuple(state.leases[lease_id].request.who for lease_id in slot.occupants)
            asked_mb, committed_mb = wishes.memory_mb, use.committed_mb
            return verdict("no_room", committed_mb=committed_mb, asked_mb=asked_mb, limit_mb=limit_mb, holders=holders)
    if utilization >= thresholds.utilization_percent and not (
        # Sharing leases expect each other's load; only use from outside keeps them off a busy GPU.
        wishes.is_shared and is_used_by_leases_only(slot, state.ignored_processes)
    ):
        threshold = thresholds.utilization_percent
        return verdict("over_utilization", utilization_percent=utilization, threshold_percent=threshold)
    return verdict("eligible", score=percent + utilization)


def _outside(state: PoolState, slot: GpuSlot, wishes: Wishes) -> Verdict | None:
    if slot.reading is None or not slot.reading.processes or not state.settings.avoids_outsiders(wishes):
        return None
    use = outside_use(slot, state.settings, state.ignored_processes)
    if use is None:
        return None
    first = use.processes[0]
    return verdict(
        "in_use_outside",
        pid=first.id.pid,
        user=first.user,
        program=first.name,
        memory_mb=use.memory_mb,
        utilization_percent=use.utilization_percent,
        others=len(use.processes) - 1,
    )


class Departures:
    """A GPU as its leases leave it. The load is taken for that of the leases that have left."""

    def __init__(self, state: PoolState, slot: GpuSlot, wishes: Wishes, now: float) -> None:
        self._wishes = wishes
        self._left = dict(slot.occupants)
        self._sharing = sum(each.asked_mb is not None for each in self._left.values())
        self._draining = sum(each.is_draining for each in self._left.values())
        self._max_sharers = state.settings.max_sharers
        reading, use = slot.reading, memory_use(slot, state.ignored_processes)
        self._left_mb = self._limit_mb = 0.0
        self.can_do = (
            reading is not None
            and reading.utilization_percent is not None
            and _unmeasured(state, slot, now) is None
            and is_suitable(state, slot, wishes)
            and _outside(state, slot, wishes) is None
        )
        if reading is not None and use is not None and reading.memory_total_mb is not None:
            self._by_lease, self._left_mb = use.by_lease, use.committed_mb
            self._limit_mb = state.settings.thresholds_for(wishes).memory_percent * reading.memory_total_mb / 100
        else:
            self.can_do = False

    def leave(self, lease_id: str) -> None:
        occupant = self._left.pop(lease_id)
        self._sharing -= occupant.asked_mb is not None
        self._draining -= occupant.is_draining
        if self.can_do:
            self._left_mb -= self._by_lease[lease_id]

    def would_do(self) -> bool:
        """Whether the GPU would do with the leases that are left."""
        if not self.can_do:
            return False
        if self._wishes.memory_mb is None:
            return not self._left and self._left_mb < self._limit_mb
        admits = self._sharing and not self._draining and len(self._left) < self._max_sharers
        return bool(not self._left or admits) and self._left_mb + self._wishes.memory_mb <= self._limit_mb
