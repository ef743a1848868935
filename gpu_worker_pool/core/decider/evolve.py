"""The only code that changes a pool. It makes no decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from gpu_worker_pool.core.accounting.fair_share import RECENT_LEASES, OwnerUse
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import (
    FULL_WEIGHT,
    ActiveLease,
    DrainingLease,
    EndedLease,
    Ending,
    EndReason,
    QueuedLease,
)
from gpu_worker_pool.core.model.slot import Occupant
from gpu_worker_pool.core.model.state import PoolState

from .evolve_nodes import NODE_HANDLERS


def evolve(state: PoolState, event: ev.Event) -> None:
    replay(state, [event])


def replay(state: PoolState, events: Iterable[ev.Event]) -> PoolState:
    """Apply the events in order and return the same state. Refusals change nothing.

    The events of one step belong together. Applied in parts they add up to the same state, but a change that the next
    event undoes (memory that is then attributed to a lease) causes one more pass over the queue.
    """
    for event in events:
        if not isinstance(event, ev.Refusal):
            state.clock = max(state.clock, event.at)
            _HANDLERS[type(event)](state, event)
    if state.touched:
        state.reindex()
    return state


def _history_condensed(state: PoolState, event: ev.HistoryCondensed) -> None:
    for node, fence in event.fences:
        state.fences[node] = max(state.fences.get(node, 0), fence)
    state.next_seq = max(state.next_seq, event.next_seq)
    state.recent = event.recent


def _lease_queued(state: PoolState, event: ev.LeaseQueued) -> None:
    lease = QueuedLease(event.lease_id, event.request, event.seq, event.requested_at)
    state.leases[lease.id] = lease
    state.owned[lease.request.holder.owner] += 1
    if lease.request.parent is None:
        state.queue.join(lease)
        state.newcomers.append(lease.id)
    else:
        state.inside.join(lease)
    state.restart_deadline(lease, event.at)
    state.next_seq = max(state.next_seq, event.seq + 1)


def _lease_granted(state: PoolState, event: ev.LeaseGranted) -> None:
    waited = state.queued(event.lease_id)
    request = waited.request
    weight = FULL_WEIGHT * len(event.gpus) if event.weight is None else event.weight
    lease = ActiveLease(
        waited.id, request, event.gpus, event.fence, waited.requested_at, event.granted_at, weight, event.limit
    )
    _put_on_timetable(state, lease)
    state.restart_deadline(lease, event.at)
    for key in event.gpus:
        state.fences[key.node] = max(state.fences.get(key.node, 0), event.fence)
    if request.parent is not None:
        state.inside.enter(waited)
        return
    state.queue.leave(waited)
    _lose_claims(state, waited.id)
    _occupy(state, lease, event.gpus, weight, event.at)
    if request.preemptible:
        state.preemptible.add(lease.id)


def _lease_extended(state: PoolState, event: ev.LeaseExtended) -> None:
    lease = state.leases[event.lease_id]
    assert isinstance(lease, ActiveLease), lease  # noqa: S101 - a broken invariant must not go on
    request = lease.request
    lease = replace(lease, gpus=(*lease.gpus, *event.gpus), weight=lease.weight + event.weight)
    state.leases[lease.id] = lease
    state.restart_deadline(lease, event.at)
    for key in event.gpus:
        state.fences[key.node] = max(state.fences.get(key.node, 0), lease.fence)
    if request.parent is None:
        _occupy(state, lease, event.gpus, event.weight, event.at)


def _occupy(state: PoolState, lease: ActiveLease, gpus: tuple[GpuKey, ...], weight: int, at: float) -> None:
    request = lease.request
    for key in gpus:
        slot = state.slot(key)
        process = request.holder.process_on(key.node)
        slot.occupants[lease.id] = Occupant(request.wishes.memory_mb, process, since=at)
        slot.busy = at
    state.touch(gpus)
    use = state.owners.get(request.holder.owner)
    if use is None:
        use = state.owners[request.holder.owner] = OwnerUse(as_of=at)
    use.hold(weight, at, is_firm=not request.preemptible)
    state.unsettle()


def _lease_warned(state: PoolState, event: ev.LeaseWarned) -> None:
    lease = state.leases[event.lease_id]
    assert isinstance(lease, ActiveLease), lease  # noqa: S101 - a broken invariant must not go on
    ending = None if event.reason is None else Ending(event.reason, event.ends)
    _put_on_timetable(state, replace(lease, ending=ending))
    (state.making_room.add if event.reason is EndReason.PREEMPTED else state.making_room.discard)(lease.id)
    state.unsettle()


def _put_on_timetable(state: PoolState, lease: ActiveLease) -> None:
    """Replace a lease, and say when it is to be warned or ended next."""
    state.leases[lease.id] = lease
    if lease.ending is not None:
        state.timetable.set(lease.id, lease.ending.at)
    elif lease.limit is not None:
        state.timetable.set(lease.id, lease.limit - lease.warning_s)
    else:
        state.timetable.drop(lease.id)


def _lose_claims(state: PoolState, lease_id: str) -> bool:
    """Nothing is kept for this waiter any more. Return whether something was."""
    had_reservation = state.reservation is not None and state.reservation.lease_id == lease_id
    if had_reservation:
        state.reservation = None
    if not state.claims:
        return had_reservation
    claimed = [key for key, claimer in state.claims.items() if claimer == lease_id]
    for key in claimed:
        del state.claims[key]
    return had_reservation or bool(claimed)


def _queue_settled(state: PoolState, event: ev.QueueSettled) -> None:
    state.reindex()  # the pass has taken earlier events into account
    state.settled_until = event.until
    state.reservation = event.reservation
    state.claims = dict(event.claims)
    state.undated = dict(event.undated)
    state.newcomers.clear()
    state.queue.line_up()


def _sub_leases_settled(state: PoolState, event: ev.SubLeasesSettled) -> None:
    state.inside.settle(event.parents)


def _leases_renewed(state: PoolState, event: ev.LeasesRenewed) -> None:
    for lease_id in event.lease_ids:
        state.restart_deadline(state.leases[lease_id], event.at)


def _lease_ended(state: PoolState, event: ev.LeaseEnded) -> None:
    lease = state.leases.pop(event.lease_id)
    state.deadlines.drop(lease.id)
    state.timetable.drop(lease.id)
    _disown(state, lease.request.holder.owner)
    is_inside = lease.request.parent is not None
    if is_inside and isinstance(lease, (QueuedLease, ActiveLease)):
        state.inside.leave(lease)
    if isinstance(lease, QueuedLease):
        if _lose_claims(state, lease.id) or state.newcomers:
            state.unsettle()  # what was kept for it is free for others
        if not is_inside:
            state.queue.leave(lease)
        ended = EndedLease(
            lease.id,
            lease.request,
            (),
            None,
            lease.requested_at,
            None,
            event.ended_at,
            event.reason,
            event.by,
            event.why,
        )
        _remember(state, ended)
        return
    assert isinstance(lease, ActiveLease), lease  # noqa: S101 - a broken invariant must not go on
    ended = EndedLease(
        lease.id,
        lease.request,
        lease.gpus,
        lease.fence,
        lease.requested_at,
        lease.granted_at,
        event.ended_at,
        event.reason,
        event.by,
        event.why,
        lease.ending.reason if lease.ending is not None and lease.ending.reason is not event.reason else None,
    )
    if is_inside:
        _remember(state, ended)  # its GPUs stay its parent's
        return
    _give_back(state, lease, ended, event.at)
    for key in lease.gpus:
        _leave_gpu(state, lease.id, key, is_draining=key in event.draining)
    if event.draining:
        drained = DrainingLease(lease.id, lease.request, event.draining, event.at, ended)
        state.leases[lease.id] = drained
        state.restart_deadline(drained, event.at)
        for key in event.draining if drained.was_left_by_holder else ():
            if (process := lease.request.holder.process_on(key.node)) is not None:
                state.reclaimable.setdefault(process, {}).setdefault(key, set()).add(lease.id)
    else:
        _remember(state, ended)


def _leave_gpu(state: PoolState, lease_id: str, key: GpuKey, *, is_draining: bool) -> None:
    occupants = state.slots[key].occupants
    # A GPU that an exclusive lease had to itself stays closed to all until it has drained: no index has an entry of it.
    if not is_draining or len(occupants) > 1 or occupants.sharing or state.settings.workers_per_gpu > 1:
        state.touched.add(key)
    if is_draining:
        was = occupants[lease_id]
        occupants[lease_id] = Occupant(was.asked_mb, was.process, is_draining=True, since=was.since)
    else:
        _vacate(state, lease_id, key)


# A lease that ended for one of these reasons lasted as long as its holder wanted, or as it may.
_ENDED_IN_TIME = {EndReason.RELEASED, EndReason.HOLDER_DIED, EndReason.EXPIRED, EndReason.TIME_LIMIT}


def _give_back(state: PoolState, lease: ActiveLease, ended: EndedLease, at: float) -> None:
    """Count what the owner no longer holds, and how long the lease lasted."""
    use = state.owners[lease.request.holder.owner]
    use.hold(-lease.weight, at, is_firm=not lease.request.preemptible)
    if ended.reason in _ENDED_IN_TIME:
        lasted_s = max(ended.ended_at - lease.granted_at, 0.0)
        use.remember(lasted_s)
        state.recent = (*state.recent, lasted_s)[-RECENT_LEASES:]
    state.preemptible.discard(lease.id)
    state.making_room.discard(lease.id)
    if state.quotas:
        state.unsettle()  # the owner may have more again, though no GPU is free yet


def _use_counted(state: PoolState, event: ev.UseCounted) -> None:
    use = state.owners.setdefault(event.owner, OwnerUse())
    use.used, use.as_of, use.recent = event.used, event.as_of, event.recent


def _quota_changed(state: PoolState, event: ev.QuotaChanged) -> None:
    if event.quota is None:
        state.quotas.pop(event.owner, None)
    else:
        state.quotas[event.owner] = event.quota
    state.line_up()


def _token_added(state: PoolState, event: ev.TokenAdded) -> None:
    state.tokens[event.token.digest] = event.token


def _token_revoked(state: PoolState, event: ev.TokenRevoked) -> None:
    state.tokens.pop(event.digest, None)


def _gpus_booked(state: PoolState, event: ev.GpusBooked) -> None:
    state.bookings[event.booking.id] = event.booking
    state.line_up()


def _booking_ended(state: PoolState, event: ev.BookingEnded) -> None:
    state.bookings.pop(event.booking_id, None)
    state.line_up()


def _disown(state: PoolState, owner: str | None) -> None:
    state.owned[owner] -= 1
    if not state.owned[owner]:
        del state.owned[owner]


def _gpu_drained(state: PoolState, event: ev.GpuDrained) -> None:
    lease = state.leases[event.lease_id]
    assert isinstance(lease, DrainingLease), lease  # noqa: S101 - a broken invariant must not go on
    _vacate(state, lease.id, event.gpu)
    _forget_reclaimable(state, lease, event.gpu)
    left = tuple([key for key in lease.gpus if key != event.gpu])
    if left:
        state.leases[lease.id] = replace(lease, gpus=left)
    else:
        del state.leases[lease.id]
        state.deadlines.drop(lease.id)
        _remember(state, lease.ended)
    state.touch((event.gpu,))


def _processes_attributed(state: PoolState, event: ev.ProcessesAttributed) -> None:
    members = state.slot(event.gpu).members
    if event.processes:
        members[event.lease_id] = event.processes
    else:
        members.pop(event.lease_id, None)
    state.touch((event.gpu,))


def _gpus_observed(state: PoolState, event: ev.GpusObserved) -> None:
    for reading in event.readings:
        slot = state.slot(reading.gpu.key)
        if not slot.is_read_as(reading):
            state.touched.add(slot.key)
        if slot.reading is None:
            state.inside.unsettle()
        was_unread = slot.reading is None or event.at - slot.reading.at > state.settings.stale_after_s
        if was_unread:
            state.unsettle()
        elif not state.preemptible.isdisjoint(slot.occupants) and slot.reading and slot.reading.use != reading.use:
            state.unsettle()  # a waiter may have it, or no longer, if the leases there end
        slot.reading = reading
        # Unknown is not idle. What it did while it was not read is unknown, too.
        load_percent = reading.load_percent
        is_idle = load_percent is not None and load_percent < state.settings.computing_percent
        if was_unread or slot.busy is None or not is_idle:
            slot.busy = event.at if slot.busy is None else max(reading.at, slot.busy)


def _vacate(state: PoolState, lease_id: str, key: GpuKey) -> None:
    slot = state.slots[key]
    del slot.occupants[lease_id]
    slot.members.pop(lease_id, None)
    state.forget_slot_if_unknown(slot)


def _forget_reclaimable(state: PoolState, lease: DrainingLease, key: GpuKey) -> None:
    if not state.reclaimable:
        return
    process = lease.request.holder.process_on(key.node)
    keys = state.reclaimable.get(process, {}) if process is not None else {}
    if process is None or lease.id not in keys.get(key, ()):
        return
    keys[key].discard(lease.id)
    if not keys[key]:
        del keys[key]
    if not keys:
        del state.reclaimable[process]


def _remember(state: PoolState, lease: EndedLease) -> None:
    state.ended[lease.id] = lease
    while len(state.ended) > state.settings.remembered_ended_leases:
        state.ended.popitem(last=False)


_HANDLERS: dict[type[ev.Event], Callable[[PoolState, Any], None]] = {
    **NODE_HANDLERS,
    ev.HistoryCondensed: _history_condensed,
    ev.LeaseQueued: _lease_queued,
    ev.LeaseGranted: _lease_granted,
    ev.LeaseExtended: _lease_extended,
    ev.LeaseWarned: _lease_warned,
    ev.LeasesRenewed: _leases_renewed,
    ev.QueueSettled: _queue_settled,
    ev.SubLeasesSettled: _sub_leases_settled,
    ev.LeaseEnded: _lease_ended,
    ev.GpuDrained: _gpu_drained,
    ev.ProcessesAttributed: _processes_attributed,
    ev.GpusObserved: _gpus_observed,
    ev.UseCounted: _use_counted,
    ev.QuotaChanged: _quota_changed,
    ev.TokenAdded: _token_added,
    ev.TokenRevoked: _token_revoked,
    ev.GpusBooked: _gpus_booked,
    ev.BookingEnded: _booking_ended,
}
