"""A short history that adds up to the same pool as the long one. A journal is compacted to it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import FULL_WEIGHT, ActiveLease, DrainingLease, EndedLease, QueuedLease
from gpu_worker_pool.core.model.state import PoolState

# A lease that left the queue has no queue position. Replay only passes through this one.
NO_SEQ = 0


class Condensed:
    """What of a state the short history is made of, as it is now. It is copied in little time, and never changes: the
    history may be made later, and in another thread.
    """

    def __init__(self, state: PoolState) -> None:
        self._at = state.clock
        self._taken_over = None
        if state.boot_id is not None:
            self._taken_over = ev.TakenOver(
                state.taken_over, state.epoch, state.boot_id, state.clock_base, state.wall_offset_s
            )
        self._nodes = tuple(state.nodes.items())
        self._leases = tuple(state.leases.values())
        self._members = [(slot.key, *item) for slot in state.slots.values() for item in slot.members.items()]
        self._fences, self._next_seq, self._recent = tuple(state.fences.items()), state.next_seq, state.recent
        self._waiting = (*state.queue, *state.inside)
        self._quotas = tuple(state.quotas.items())
        self._tokens = tuple(state.tokens.values())
        self._owners = [(owner, use.used, use.as_of, use.recent) for owner, use in state.owners.items()]
        self._bookings = tuple(state.bookings.values())
        self._excluded, self._new_gpus_excluded = tuple(state.excluded.items()), state.new_gpus_excluded
        self._ignored = tuple(state.ignored_processes)

    def events(self) -> Iterator[ev.DurableEvent]:
        """The events that turn an empty pool into this one, without what a restart makes void, and without ended leases."""
        at = self._at
        if self._taken_over is not None:
            yield self._taken_over
        for name, node in sorted(self._nodes, key=itemgetter(0)):
            yield ev.NodeJoined(at, name, node.boot_id, node.gpus, node.machine_id)
        granted = [lease for lease in self._leases if isinstance(lease, ActiveLease | DrainingLease)]
        # Leases that share a GPU came to it in the order of their fences. Those with the same fence share no node.
        for lease in sorted(granted, key=lambda lease: (_grant_of(lease).fence, lease.gpus[0].node)):
            yield from _granted(lease, at)
        for key, lease_id, processes in self._members:
            yield ev.ProcessesAttributed(at, lease_id, key, processes)
        for lease in granted:
            if isinstance(lease, DrainingLease):
                ended = lease.ended
                yield ev.LeaseEnded(
                    lease.since, lease.id, ended.reason, lease.gpus, ended.ended_at, ended.by, ended.why
                )
        # After the ends of leases that drain: how long these lasted is counted already.
        yield ev.HistoryCondensed(at, tuple(sorted(self._fences)), self._next_seq, self._recent)
        waiting = {lease.id: lease for lease in self._leases if isinstance(lease, QueuedLease)}
        for lease_id in self._waiting:
            waiter = waiting[lease_id]
            yield ev.LeaseQueued(at, waiter.id, waiter.request, waiter.seq, waiter.requested_at)
        yield from self._of_owners_and_operators(at)

    def _of_owners_and_operators(self, at: float) -> Iterator[ev.DurableEvent]:
        for owner, quota in sorted(self._quotas, key=itemgetter(0)):
            yield ev.QuotaChanged(at, owner, quota)
        for token in self._tokens:
            yield ev.TokenAdded(at, token)
        for name_of_owner, used, as_of, recent in self._owners:
            yield ev.UseCounted(at, name_of_owner, used, as_of, recent)
        for booking in self._bookings:
            yield ev.GpusBooked(at, booking)
        for key, reason in self._excluded:
            yield ev.GpuExcluded(at, key, reason)
        if self._new_gpus_excluded is not None:
            yield ev.NewGpusExcluded(at, self._new_gpus_excluded)
        for process_name in sorted(self._ignored):
            yield ev.ProcessIgnored(at, process_name)


def condense(state: PoolState) -> list[ev.DurableEvent]:
    """The short history of a state, at once."""
    return list(Condensed(state).events())


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
