"""The only code that changes a pool. It makes no decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import row_key
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import FULL_WEIGHT, ActiveLease, EndedLease, Ending, EndReason, QueuedLease
from gpu_worker_pool.core.model.slot import Occupant
from gpu_worker_pool.core.model.state import RECENT_LEASES, OwnerUse, PoolState

from .evolve_nodes import NODE_HANDLERS

# The owners whose use is remembered.
MOST_OWNERS = 1000
# After these, whether the queue must be served again is told by the facts of the GPUs.
_QUIET = (
    ev.GpusObserved,
    ev.ProcessesAttributed,
    ev.LeasesRenewed,
    ev.LeaseEnded,
    ev.ClientLeft,
    ev.TimeLost,
    ev.QueueSettled,
    ev.NodeAnnounced,
    ev.LeasesMeasured,
)


def replay(state: PoolState, events: Iterable[ev.Event]) -> PoolState:
    """Apply the events in order and return the same state. Refusals change nothing.

    The events of one step belong together. Applied in parts they add up to the same state, but a change that the next
    event undoes (memory that is then attributed to a lease) causes one more pass over the queue.
    """
    for event in events:
        if isinstance(event, ev.Refused):
            continue
        state.clock = max(state.clock, event.at)
        _HANDLERS[type(event)](state, event)
        if not isinstance(event, _QUIET):
            state.unsettle()
    state.refresh_facts()
    return state


def _history_condensed(state: PoolState, event: ev.HistoryCondensed) -> None:
    for node, fence in event.fences:
        state.fences[node] = max(state.fences.get(node, 0), fence)
    state.next_seq = max(state.next_seq, event.next_seq)
    state.last_durations_s = event.last_durations_s


def _configured(state: PoolState, event: ev.Configured) -> None:
    rows, key = getattr(state, event.table), row_key(event.table, event.key)
    if event.value is None:
        rows.pop(key, None)
    else:
        rows[key] = event.value
    if event.table == "excluded":
        state.touch((GpuKey(*event.key),))
    elif event.table == "ignored_processes":
        state.touch(state.slots)


def _lease_queued(state: PoolState, event: ev.LeaseQueued) -> None:
    lease = QueuedLease(event.lease_id, event.request, event.seq, event.requested_at)
    _count_new(state, lease)
    state.leases[lease.id] = lease
    state.queue.join(lease)
    state.restart_ttl(lease, event.at)


def _count_new(state: PoolState, lease: QueuedLease) -> None:
    state.live_count[lease.request.holder.owner] += 1
    state.next_seq = max(state.next_seq, lease.seq + 1)


def _lease_granted(state: PoolState, event: ev.LeaseGranted) -> None:
    if event.request is not None:
        requested_at = event.granted_at if event.requested_at is None else event.requested_at
        waited = QueuedLease(event.lease_id, event.request, event.seq, requested_at)
        _count_new(state, waited)
    else:
        waited = state.queued(event.lease_id)
        state.queue.leave(waited)
        _lose_claims(state, waited.id)
    request = waited.request
    weight = FULL_WEIGHT * len(event.gpus) if event.weight is None else event.weight
    times = (waited.requested_at, event.granted_at)
    lease = ActiveLease(waited.id, request, event.gpus, event.fence, *times, weight, event.limit, seq=waited.seq)
    _replace_active(state, lease)
    state.restart_ttl(lease, event.at)
    if event.take_up_s is not None:
        state.untaken.add(lease.id)
        state.ttl_due.set(lease.id, state.live(event.at) + event.take_up_s)
    _occupy(state, lease, event.gpus, weight, event.at)
    if request.preemptible:
        state.preemptible.add(lease.id)


def _grant_withdrawn(state: PoolState, event: ev.GrantWithdrawn) -> None:
    lease = state.active(event.lease_id)
    state.limit_due.drop(lease.id)
    state.lease_uses.pop(lease.id, None)
    _hold_no_more(state, lease, event.at)
    for key in lease.gpus:
        slot = state.slots[key]
        # It was not used, as far as is known: the next reading tells.
        slot.reading = slot.busy = None
        _vacate(state, lease.id, key)
    state.touch(lease.gpus)
    waits = QueuedLease(lease.id, lease.request, lease.seq, lease.requested_at)
    state.leases[lease.id] = waits
    state.queue.join(waits)
    state.restart_ttl(waits, event.at)
    if not event.by_box:
        state.passed_over.add(lease.id)


def _lease_extended(state: PoolState, event: ev.LeaseExtended) -> None:
    lease = state.active(event.lease_id)
    lease = replace(lease, gpus=(*lease.gpus, *event.gpus), weight=lease.weight + event.weight)
    state.leases[lease.id] = lease
    state.restart_ttl(lease, event.at)
    _occupy(state, lease, event.gpus, event.weight, event.at)


def _occupy(state: PoolState, lease: ActiveLease, gpus: tuple[GpuKey, ...], weight: int, at: float) -> None:
    request = lease.request
    for key in gpus:
        state.fences[key.node] = max(state.fences.get(key.node, 0), lease.fence)
        slot = state.slot(key)
        process = request.holder.process_on(key.node)
        slot.occupants[lease.id] = Occupant(request.wishes.memory_mb, process, since=at)
        slot.busy = at
    state.touch(gpus)
    _use_of(state, request.holder.owner, at).hold(weight, at, is_firm=not request.preemptible)


def _use_of(state: PoolState, owner: str | None, at: float) -> OwnerUse:
    """What an owner uses. Of more owners than are remembered, the one that used least and holds nothing is forgotten."""
    use = state.usage.get(owner)
    if use is None:
        if len(state.usage) >= MOST_OWNERS:
            idle = [(each.used_at(at), name or "", name) for name, each in state.usage.items() if not each.held]
            if idle:
                del state.usage[min(idle)[-1]]
        use = state.usage[owner] = OwnerUse(as_of=at)
    return use


def _lease_warned(state: PoolState, event: ev.LeaseWarned) -> None:
    lease = state.active(event.lease_id)
    ending = None if event.reason is None else Ending(event.reason, event.ends)
    _replace_active(state, replace(lease, ending=ending))
    (state.preempt_warned.add if event.reason is EndReason.PREEMPTED else state.preempt_warned.discard)(lease.id)


def _replace_active(state: PoolState, lease: ActiveLease) -> None:
    """Replace a lease, and say when it is to be warned or ended next."""
    state.leases[lease.id] = lease
    if lease.ending is not None:
        state.limit_due.set(lease.id, lease.ending.at)
    elif lease.limit is not None:
        state.limit_due.set(lease.id, lease.limit - lease.warning_s)
    else:
        state.limit_due.drop(lease.id)


def _lose_claims(state: PoolState, lease_id: str) -> None:
    """Nothing is kept for this waiter any more."""
    if state.reservation is not None and state.reservation.lease_id == lease_id:
        state.reservation = None
    for key in [key for key, claimer in state.claims.items() if claimer == lease_id]:
        del state.claims[key]


def _queue_settled(state: PoolState, event: ev.QueueSettled) -> None:
    state.refresh_facts()  # the pass has taken earlier events into account
    state.settled_until = event.until
    state.reservation = event.reservation
    state.claims = dict(event.claims)


def _leases_renewed(state: PoolState, event: ev.LeasesRenewed) -> None:
    for lease_id in event.lease_ids:
        state.restart_ttl(state.leases[lease_id], event.at)
        state.away.discard(lease_id)
        if lease_id in state.passed_over:
            state.passed_over.discard(lease_id)
            state.unsettle()


def _client_left(state: PoolState, event: ev.ClientLeft) -> None:
    state.away.add(event.lease_id)


def _time_lost(state: PoolState, event: ev.TimeLost) -> None:
    state.lost_s += event.lost_s


def _wall_time_set(state: PoolState, event: ev.WallTimeSet) -> None:
    state.wall_offset_s = event.offset_s


def _lease_ended(state: PoolState, event: ev.LeaseEnded) -> None:
    lease = state.leases.pop(event.lease_id)
    assert not isinstance(lease, EndedLease), lease  # noqa: S101 - a broken invariant must not go on
    state.ttl_due.drop(lease.id)
    state.limit_due.drop(lease.id)
    state.lease_uses.pop(lease.id, None)
    for clients in (state.untaken, state.away, state.passed_over):
        clients.discard(lease.id)
    _count_live(state, lease.request.holder.owner, -1)
    held = lease if isinstance(lease, ActiveLease) else None
    warned = held.ending.reason if held and held.ending and held.ending.reason is not event.reason else None
    ended = EndedLease(
        lease.id,
        lease.request,
        held.gpus if held else (),
        held.fence if held else None,
        lease.requested_at,
        held.granted_at if held else None,
        event.ended_at,
        event.reason,
        event.by,
        event.why,
        warned,
        event.draining,
        event.at if event.draining else None,
        event.peak_memory_mb,
        event.mean_utilization_percent,
    )
    if isinstance(lease, QueuedLease):
        _lose_claims(state, lease.id)
        state.queue.leave(lease)
        state.unsettle()  # what was kept for it is free for others
    else:
        _count_use(state, lease, ended, event.at)
        for key in lease.gpus:
            if key in event.draining:
                occupants = state.slots[key].occupants
                occupants[lease.id] = replace(occupants[lease.id], is_draining=True, was_left=ended.was_left_by_holder)
            else:
                _vacate(state, lease.id, key)
        state.touch(lease.gpus)
    if event.draining:
        state.leases[lease.id] = ended
        state.restart_ttl(ended, event.at)
    else:
        _remember(state, ended)


# A lease that ended for one of these reasons lasted as long as its holder wanted, or as it may.
_ENDED_IN_TIME = {EndReason.RELEASED, EndReason.HOLDER_DIED, EndReason.EXPIRED, EndReason.TIME_LIMIT}


def _count_use(state: PoolState, lease: ActiveLease, ended: EndedLease, at: float) -> None:
    """Count what the owner no longer holds, and how long the lease lasted."""
    use = _hold_no_more(state, lease, at)
    if ended.reason in _ENDED_IN_TIME:
        lasted_s = max(ended.ended_at - lease.granted_at, 0.0)
        use.remember(lasted_s)
        state.last_durations_s = (*state.last_durations_s, lasted_s)[-RECENT_LEASES:]
    if state.quotas or state.groups or state.preemptible or state.bookings:
        # Though no GPU is free yet, the owner may have more again, preemption have become enough for a waiter, or leases like
        # this one be predicted to end before a booking.
        state.unsettle()


def _hold_no_more(state: PoolState, lease: ActiveLease, at: float) -> OwnerUse:
    use = state.usage[lease.request.holder.owner]
    use.hold(-lease.weight, at, is_firm=not lease.request.preemptible)
    state.preemptible.discard(lease.id)
    state.preempt_warned.discard(lease.id)
    return use


def _use_counted(state: PoolState, event: ev.UseCounted) -> None:
    use = state.usage.setdefault(event.owner, OwnerUse())
    use.used, use.as_of, use.recent = event.used, event.as_of, event.recent


def _count_live(state: PoolState, owner: str | None, number: int) -> None:
    state.live_count[owner] += number
    if not state.live_count[owner]:
        del state.live_count[owner]


def _gpu_drained(state: PoolState, event: ev.GpuDrained) -> None:
    lease = state.leases[event.lease_id]
    assert isinstance(lease, EndedLease), lease  # noqa: S101 - a broken invariant must not go on
    _vacate(state, lease.id, event.gpu)
    left = tuple([key for key in lease.draining if key != event.gpu])
    if left:
        state.leases[lease.id] = replace(lease, draining=left)
    else:
        del state.leases[lease.id]
        state.ttl_due.drop(lease.id)
        _remember(state, lease.record)
    state.touch((event.gpu,))


def _vacate(state: PoolState, lease_id: str, key: GpuKey) -> None:
    slot = state.slots[key]
    del slot.occupants[lease_id]
    slot.members.pop(lease_id, None)
    state.forget_slot_if_unknown(slot)


def _remember(state: PoolState, lease: EndedLease) -> None:
    state.ended[lease.id] = lease
    while len(state.ended) > state.settings.remembered_ended_leases:
        state.ended.popitem(last=False)


_HANDLERS: dict[type[ev.Event], Callable[[PoolState, Any], None]] = {
    **NODE_HANDLERS,
    ev.HistoryCondensed: _history_condensed,
    ev.Configured: _configured,
    ev.LeaseQueued: _lease_queued,
    ev.LeaseGranted: _lease_granted,
    ev.GrantWithdrawn: _grant_withdrawn,
    ev.LeaseExtended: _lease_extended,
    ev.LeaseWarned: _lease_warned,
    ev.LeasesRenewed: _leases_renewed,
    ev.ClientLeft: _client_left,
    ev.TimeLost: _time_lost,
    ev.WallTimeSet: _wall_time_set,
    ev.QueueSettled: _queue_settled,
    ev.LeaseEnded: _lease_ended,
    ev.GpuDrained: _gpu_drained,
    ev.UseCounted: _use_counted,
}
