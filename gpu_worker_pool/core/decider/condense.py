"""A short history that adds up to the same pool as the long one. A journal is compacted to it."""

from __future__ import annotations

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import FULL_WEIGHT, ActiveLease, DrainingLease, EndedLease
from gpu_worker_pool.core.model.state import PoolState

# A lease that left the queue has no queue position. Replay only passes through this one.
NO_SEQ = 0


def condense(state: PoolState) -> list[ev.DurableEvent]:
    """The events that turn an empty pool into this one, without what a restart makes void, and without ended leases."""
    at = state.clock
    events: list[ev.DurableEvent] = []
    if state.boot_id is not None:
        events.append(ev.TakenOver(state.taken_over, state.epoch, state.boot_id, state.clock_base, state.wall_offset_s))
    events += [
        ev.NodeJoined(at, name, node.boot_id, node.gpus, node.machine_id) for name, node in sorted(state.nodes.items())
    ]
    granted = [lease for lease in state.leases.values() if isinstance(lease, ActiveLease | DrainingLease)]
    # Leases that share a GPU came to it in the order of their fences. Those with the same fence share no node.
    for lease in sorted(granted, key=lambda lease: (_grant_of(lease).fence, lease.gpus[0].node)):
        events += _granted(lease, at)
    for slot in state.slots.values():
        for lease_id, processes in slot.members.items():
            events.append(ev.ProcessesAttributed(at, lease_id, slot.key, processes))
    events += [
        ev.LeaseEnded(
            lease.since,
            lease.id,
            lease.ended.reason,
            lease.gpus,
            lease.ended.ended_at,
            lease.ended.by,
            lease.ended.why,
        )
        for lease in granted
        if isinstance(lease, DrainingLease)
    ]
    # After the ends of leases that drain: how long these lasted is counted already.
    events.append(ev.HistoryCondensed(at, tuple(sorted(state.fences.items())), state.next_seq, state.recent))
    for lease_id in (*state.queue, *state.inside):
        waiting = state.queued(lease_id)
        events.append(ev.LeaseQueued(at, waiting.id, waiting.request, waiting.seq, waiting.requested_at))
    events += [ev.QuotaChanged(at, owner, quota) for owner, quota in sorted(state.quotas.items())]
    events += [ev.TokenAdded(at, token) for token in state.tokens.values()]
    events += [ev.UseCounted(at, owner, use.used, use.as_of, use.recent) for owner, use in state.owners.items()]
    events += [ev.GpusBooked(at, booking) for booking in state.bookings.values()]
    events += [ev.GpuExcluded(at, key, reason) for key, reason in state.excluded.items()]
    events += [ev.ProcessIgnored(at, name) for name in sorted(state.ignored_processes)]
    return events


def _granted(lease: ActiveLease | DrainingLease, at: float) -> list[ev.DurableEvent]:
    grant = _grant_of(lease)
    assert grant.fence is not None and grant.granted_at is not None  # noqa: S101, PT018 - it was granted
    queued = ev.LeaseQueued(at, lease.id, lease.request, NO_SEQ, grant.requested_at)
    if isinstance(lease, DrainingLease):
        warned = [] if lease.ended.warned is None else [ev.LeaseWarned(at, lease.id, lease.ended.warned, at)]
        return [queued, ev.LeaseGranted(at, lease.id, grant.gpus, grant.fence, grant.granted_at), *warned]
    granted = ev.LeaseGranted(
        at, lease.id, grant.gpus, grant.fence, grant.granted_at, lease.limit, _unusual_weight(lease)
    )
    ending = lease.ending
    return [queued, granted, *([ev.LeaseWarned(at, lease.id, ending.reason, ending.at)] if ending else [])]


def _unusual_weight(lease: ActiveLease) -> int | None:
    return None if lease.weight == FULL_WEIGHT * len(lease.gpus) else lease.weight


def _grant_of(lease: ActiveLease | DrainingLease) -> ActiveLease | EndedLease:
    return lease.ended if isinstance(lease, DrainingLease) else lease
