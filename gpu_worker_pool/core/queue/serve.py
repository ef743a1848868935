"""The queue's rule: which waiter is served next.

One pass goes over the waiters in order (see owners.py) and serves the first that can be. A later waiter may be served while
an earlier one waits, if it takes nothing that is kept from it (see withheld.py). Only one waiter has a reservation: the
first that cannot be served and has waited long (see reserving.py). So wide requests do not starve, and few wait for them.

A GPU that is in use only by what the waiter's own process has left there is free to that process (`as_left_to` in
eligibility.py), unless a waiter ahead needs such a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease, Reservation
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.model.waiting import RequestClass

from .eligibility import as_left_to, is_suitable
from .owners import Order, over_quota
from .placement import NOTHING, Grant, Placer
from .planner import Planner
from .preemption import find_claim, spared
from .reserving import Reserving
from .withheld import Withheld

T = TypeVar("T")
# The places of a request that may be served by any GPU (see InVain).
ANYWHERE = (None, None, None, None, None)


@dataclass(slots=True)
class QueuePass:
    """The result of a pass over the queue: the grant, or the preemptible leases to end, the GPUs that become a waiter's
    that way, the leases that need not end after all, the reservation, and how long that stays true if no event happens.
    `settled_until` is None if another pass is due after what this one found.
    """

    grant: Grant | None = None
    victims: tuple[str, ...] = ()
    claims: dict[GpuKey, str] = field(default_factory=dict)
    spared: list[str] = field(default_factory=list)
    reservation: Reservation | None = None
    settled_until: float | None = None


class InVain(Generic[T]):
    """Looks for something to meet wishes, and not again for as much as was looked for in vain, or more. In one pass over the
    queue, GPUs that are claimed stay so, and what has failed fails until its end.
    """

    def __init__(self, find: Callable[[Wishes, AbstractSet[GpuKey]], T | None]) -> None:
        self._find = find
        # (GPUs on each node, nodes, MB) by what else was asked for, and the GPUs that were kept from it.
        self._failed: dict[tuple[object, ...], list[tuple[int, int, float]]] = {}

    def find(self, wishes: Wishes, kept: frozenset[GpuKey], claimed: AbstractSet[GpuKey]) -> T | None:
        """What is found without the GPUs that are kept from this waiter, and those that are claimed."""
        terms = (wishes.is_shared, wishes.memory_threshold_percent, wishes.utilization_threshold_percent)
        places = (wishes.model, wishes.among, wishes.node, wishes.exclude, wishes.min_memory_mb)
        memory_mb = wishes.memory_mb or 0.0
        for kept_then in {kept, NOTHING}:
            for places_then in {places, ANYWHERE}:
                for gpus, nodes, least_mb in self._failed.get((kept_then, terms, places_then), ()):
                    if wishes.gpus >= gpus and wishes.nodes >= nodes and memory_mb >= least_mb:
                        return None
        found = self._find(wishes, claimed | kept if claimed else kept)
        if found is None:
            failed = self._failed.setdefault((kept, terms, places), [])
            # Only the least of what failed is looked at again, however many waiters there are.
            failed[:] = [
                each for each in failed if each[0] < wishes.gpus or each[1] < wishes.nodes or each[2] < memory_mb
            ]
            failed.append((wishes.gpus, wishes.nodes, memory_mb))
        return found


def serve_queue(state: PoolState, now: float, *, newcomer: QueuedLease | None = None) -> QueuePass:
    """Find the first waiter that can be served. A `newcomer` is served as if it waited, in its place."""
    waiters = Order(state, now).lease_ids(newcomer=newcomer)
    return _Pass(state, now, Placer(state, now), newcomer).run(waiters)


class _Pass:
    def __init__(self, state: PoolState, now: float, placer: Placer, newcomer: QueuedLease | None) -> None:
        self._state = state
        self._now = now
        # The newcomer is in no queue.
        self._new = {} if newcomer is None else {newcomer.id: (newcomer, state.queue.class_for(newcomer.request))}
        self._placer, self._withheld = placer, Withheld(state, now, newcomer)
        self._reserving = Reserving(state, now, Planner(state, now, self._withheld), self._withheld, newcomer)
        self._places, self._rooms = InVain(self._placer.place), InVain(partial(find_claim, self._placer))
        self._found, self._is_any_left = QueuePass(), state.facts.is_any_left
        # The classes of the waiters so far that cannot be served, with whether their owners may have more.
        self._unserved: dict[RequestClass, bool] = {}

    def run(self, waiters: Iterable[str]) -> QueuePass:
        state, found, withheld, unserved = self._state, self._found, self._withheld, self._unserved
        for lease_id in waiters:
            request_class = state.queue.class_of.get(lease_id) or self._new[lease_id][1]
            is_settled = withheld.reservation is not None or not self._reserving.is_any_due
            if lease_id in state.passed_over or (request_class in unserved and is_settled and not self._is_any_left):
                continue  # it is as with a waiter of its class before
            lease = state.queued(lease_id) if lease_id in state.leases else self._new[lease_id][0]
            if self._is_over_after(lease, request_class):
                return found
        awaited = {*found.claims, *(found.reservation.gpus if found.reservation else ())}
        found.spared = spared(state, awaited, self._now)
        until = min(self._placer.holds_until, self._reserving.changes_at, withheld.change_at())
        # What is free, and when, is told with those going on that are spared.
        found.settled_until = None if found.spared else until
        return found

    def _is_over_after(self, lease: QueuedLease, request_class: RequestClass) -> bool:
        """Serve one waiter if it can be. Return whether the others can be told only with what was found so far."""
        state, claims = self._state, self._found.claims
        is_new = request_class not in self._unserved
        if is_new and over_quota(state, request_class) is not None:
            self._unserved[request_class] = False
        if not self._unserved.get(request_class, True):
            return False
        kept = self._withheld.kept_from(request_class) if is_new or self._is_any_left else NOTHING
        if is_new:
            gpus = self._places.find(request_class.wishes, kept, claims.keys())
            if gpus is not None:
                self._found.grant = Grant(lease.id, self._placer.with_home(gpus, lease, claims.keys() | kept))
                return True
        if self._is_any_left:
            own = _left_gpu(self._placer, lease, self._unserved, claims.keys() | kept)
            if own is not None:
                self._found.grant = Grant(lease.id, (own,))
                return True
        if is_new and state.preemptible and not request_class.preemptible:
            claim = self._rooms.find(request_class.wishes, kept, claims.keys())
            if claim is not None:
                self._found.victims = claim.victims
                claims.update(dict.fromkeys(claim.gpus, lease.id))
                return bool(claim.victims)  # who else needs one is told with these on their way out
        self._unserved[request_class] = True
        may_reserve = self._withheld.reservation is None and self._reserving.is_any_due
        if may_reserve and self._reserving.is_due(lease):
            self._found.reservation = self._withheld.reservation = self._reserving.reserve(lease, request_class)
        return False


def _left_gpu(
    placer: Placer, lease: QueuedLease, ahead: Iterable[RequestClass], avoiding: AbstractSet[GpuKey]
) -> GpuKey | None:
    """A GPU that only the waiter's own process uses, if no waiter ahead needs such a GPU: it must not be overtaken for ever by a
    process that keeps it warm.
    """
    state, process, wishes = placer.state, lease.request.holder.process, lease.request.wishes
    for key in sorted(state.facts.left_to(process), key=lambda key: (placer.rank(key, wishes), key)):
        slot = as_left_to(state, state.slots[key], lease.request)
        if slot is None or key in avoiding or not placer.judge(slot, wishes).is_eligible:
            continue
        if not any(is_suitable(state, slot, request_class.wishes) for request_class in ahead):
            return key
    return None
