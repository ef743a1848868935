"""Short histories that add up to a pool: what a journal is compacted to, and what a backup is restored as."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Final

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import ALL, TABLES
from gpu_worker_pool.core.model.lease import FULL_WEIGHT, ActiveLease, EndedLease, Ending, QueuedLease
from gpu_worker_pool.core.model.state import PoolState

# A lease that has ended has no queue position. Replay only passes through this one.
NO_SEQ: Final = 0
# More grants than a node makes between a copy and its return: a fence must not be used twice.
FENCES_AHEAD: Final = 1_000_000_000


def condense(state: PoolState) -> list[ev.DurableEvent]:
    """The events that turn an empty pool into this one, without what a restart makes void, and without ended leases."""
    return list(_condensed(state))


def _condensed(state: PoolState) -> Iterator[ev.DurableEvent]:
    at = state.clock
    if state.boot_id is not None:
        yield ev.TakenOver(state.taken_over, state.epoch, state.boot_id, state.clock_base, state.wall_offset_s)
    for name, node in sorted(state.nodes.items(), key=itemgetter(0)):
        yield ev.NodeJoined(at, name, node.boot_id, node.gpus, node.machine_id)
    granted = [lease for lease in state.leases.values() if not isinstance(lease, QueuedLease)]
    # Leases that share a GPU came to it in the order of their fences. Those with the same fence share no node.
    for lease in sorted(granted, key=lambda lease: (lease.fence, lease.gpus[0].node)):
        yield from _granted(lease, at)
    for slot in state.slots.values():
        for lease_id, processes in slot.members.items():
            yield ev.ProcessesAttributed(at, lease_id, slot.key, processes)
    if state.lease_uses:
        yield ev.LeasesMeasured(at, tuple(state.lease_uses.values()))
    yield from (_ended(lease, at) for lease in granted if isinstance(lease, EndedLease))
    # After the ends of leases that drain: how long these lasted is counted already.
    fences = tuple(ev.NodeFence(*item) for item in sorted(state.fences.items()))
    yield ev.HistoryCondensed(at, fences, state.next_seq, state.last_durations_s)
    for waiter in map(state.queued, state.queue):
        yield ev.LeaseQueued(at, waiter.id, waiter.request, waiter.seq, waiter.requested_at)
    for owner, use in state.usage.items():
        yield ev.UseCounted(at, owner, use.used, use.as_of, use.recent)
    for table in TABLES:
        for row_key, value in getattr(state, table).items():
            yield ev.Configured(at, table, (row_key,) if isinstance(row_key, str) else row_key, value)


def put_back(state: PoolState, reason: str) -> list[ev.DurableEvent]:
    """The short history of a state from an old copy, with every GPU out of service for this reason and all fences far ahead.

    What happened after the copy is not known. A holder on another machine may have a GPU under a lease that the copy does
    not know, so an operator decides when the GPUs are granted again. That includes GPUs that the copy does not know: they are
    out of service when a server first reads them. A GPU that was out of service keeps its reason.
    """
    nodes = sorted({*state.nodes, *state.fences})
    fences = tuple(ev.NodeFence(node, state.fences.get(node, 0) + FENCES_AHEAD) for node in nodes)
    history = [
        replace(event, fences=fences) if isinstance(event, ev.HistoryCondensed) else event for event in condense(state)
    ]
    known = {slot.key for slot in state.slots.values() if slot.installed is not None or slot.occupants}
    out = sorted(known - state.excluded.keys())
    excluded = [ev.Configured(state.clock, "excluded", key, reason) for key in out]
    return [*history, *excluded, ev.Configured(state.clock, "new_gpus", ALL, reason)]


def _granted(lease: ActiveLease | EndedLease, at: float) -> list[ev.DurableEvent]:
    assert lease.fence is not None and lease.granted_at is not None  # noqa: S101, PT018 - it was granted
    limit, weight, seq, ending = None, None, NO_SEQ, None
    if isinstance(lease, ActiveLease):
        limit, seq, ending = lease.limit, lease.seq, lease.ending
        weight = None if lease.weight == FULL_WEIGHT * len(lease.gpus) else lease.weight
    elif lease.warned is not None:
        ending = Ending(lease.warned, at)
    grant = (at, lease.id, lease.gpus, lease.fence, lease.granted_at, limit, weight)
    granted = ev.LeaseGranted(*grant, request=lease.request, seq=seq, requested_at=lease.requested_at)
    return [granted, *([] if ending is None else [ev.LeaseWarned(at, lease.id, ending.reason, ending.at)])]


def _ended(lease: EndedLease, at: float) -> ev.LeaseEnded:
    since = at if lease.drains_since is None else lease.drains_since
    used = (lease.peak_memory_mb, lease.mean_utilization_percent)
    return ev.LeaseEnded(since, lease.id, lease.reason, lease.draining, lease.ended_at, lease.by, lease.why, *used)
