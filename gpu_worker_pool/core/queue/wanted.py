"""Whether a waiter could be served if a lease were released.

A holder with many short tasks keeps its lease from one to the next. Between two of them it asks, so that those that wait come
before its next task, as they would if each task had a lease of its own.
"""

from __future__ import annotations

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, QueuedLease
from gpu_worker_pool.core.model.request import Request, Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.model.waiting import RequestClass

from .eligibility import Departures
from .owners import Order, over_quota
from .placement import Placer
from .withheld import Withheld


def wanted_by(state: PoolState, lease_id: str, now: float) -> QueuedLease | None:
    """The first waiter that comes before a new request like that of this lease, and for which its GPUs are reserved, or are what
    is missing on their node; None if there is none. Waiters for the same work do not count.
    """
    lease, now = state.leases.get(lease_id), max(now, state.clock)
    if not isinstance(lease, ActiveLease):
        return None
    again = QueuedLease(lease.id, lease.request, state.next_seq, now + state.wall_offset_s)
    ahead = Order(state, now).lease_ids(newcomer=again)
    withheld, placer, first = Withheld(state, now), Placer(state, now), state.reservation
    # The classes of the waiters so far that would not be served.
    unserved: set[RequestClass] = set()
    for waiter in map(state.queued, ahead[: ahead.index(lease_id)]):
        request_class = state.queue.class_of[waiter.id]
        if waiter.id in state.passed_over or _work_of(waiter.request) == _work_of(lease.request):
            continue
        if first is not None and first.lease_id == waiter.id and not set(lease.gpus).isdisjoint(first.gpus):
            return waiter
        if request_class not in unserved and _would_serve(placer, lease, request_class, withheld):
            return waiter
        unserved.add(request_class)
    return None


def _work_of(request: Request) -> tuple[object, ...]:
    terms = (request.wishes, request.priority, request.time_limit_s, request.preemptible)
    return (*terms, request.labels, request.holder.owner)


def _would_serve(placer: Placer, lease: ActiveLease, request_class: RequestClass, withheld: Withheld) -> bool:
    """Whether a waiter of this class has enough with what the lease leaves on one of its nodes."""
    state, wishes = placer.state, request_class.wishes
    # What the lease counts for its owner is free again, too.
    if request_class.owner != lease.request.holder.owner and over_quota(state, request_class) is not None:
        return False
    kept = withheld.kept_from(request_class)
    for node in {key.node for key in lease.gpus}:
        on_node = state.facts.nodes[node].gpus.keys() - kept
        left = [key for key in on_node & set(lease.gpus) if _would_do(placer, lease, key, wishes)]
        others = [key for key in on_node - set(lease.gpus) if placer.is_eligible(key, wishes)]
        if left and len(left) + len(others) >= wishes.gpus:
            return True
    return False


def _would_do(placer: Placer, lease: ActiveLease, key: GpuKey, wishes: Wishes) -> bool:
    """Whether a GPU of the lease would do without it."""
    departures = Departures(placer.state, placer.state.slots[key], wishes, placer.now)
    departures.leave(lease.id)
    return departures.would_do()
