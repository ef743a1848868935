"""The leases and waiters that a call means: those of the box that was asked, or all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.lease import DrainingLease, Lease, LiveLease, QueuedLease
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.owners import Order
from gpu_worker_pool.core.queue.sub_leases import leases_inside, parent_of
from gpu_worker_pool.server.http.scope import Scope


def waiters(state: PoolState, scope: Scope, now: float) -> list[str]:
    """The waiters that GPUs within the scope may serve, the next one first; then those inside leases there."""
    inside = (id_ for id_ in state.inside if scope.node is None or scope.node in nodes_of(state, state.leases[id_]))
    return [*Order(state, now).lease_ids(scope.node), *inside]


def first_waiters(state: PoolState, scope: Scope, now: float, most: int) -> tuple[list[str], int]:
    """The first so many of them, and how many there are. Where owners are treated alike, no other waiter is looked at."""
    if scope.node is not None or state.queue.splits_owners:
        waiting = waiters(state, scope, now)
        return waiting[:most], len(waiting)
    return list(islice(chain(state.queue, state.inside), most)), len(state.queue) + len(state.inside)


def holders(state: PoolState, scope: Scope) -> Iterator[str]:
    """The leases that have GPUs within the scope, also those that drain."""
    if scope.node is None:
        return (id_ for id_, lease in state.leases.items() if not isinstance(lease, QueuedLease))
    outer = dict.fromkeys(id_ for slot in state.slots_on(scope.node) for id_ in slot.occupants)
    inner = (lease for id_ in outer for lease in leases_inside(state, id_))
    active = (lease.id for lease in inner if not isinstance(lease, QueuedLease) and shows(state, lease, scope))
    return iter((*outer, *active))


def live_leases(state: PoolState, scope: Scope, now: float) -> list[str]:
    """All live leases within the scope."""
    return list(state.leases) if scope.node is None else [*holders(state, scope), *waiters(state, scope, now)]


def nodes_of(state: PoolState, lease: Lease) -> frozenset[str]:
    """The nodes that a lease is on. A waiter, or a lease that ended as one, is on the one that
    it asked for, if it asked for one."""
    if isinstance(lease, QueuedLease) and lease.request.parent is not None:
        return nodes_of(state, parent_of(state, lease))
    ended = lease.ended if isinstance(lease, DrainingLease) else lease
    if not isinstance(ended, QueuedLease) and ended.gpus:
        return frozenset(key.node for key in ended.gpus)
    return frozenset() if lease.request.wishes.node is None else frozenset({lease.request.wishes.node})


def shows(state: PoolState, lease: LiveLease, scope: Scope) -> bool:
    """Whether a lease is within the scope: it has GPUs there, or GPUs there may serve it."""
    if scope.node is None:
        return True
    nodes = nodes_of(state, lease)
    return scope.node in nodes or (isinstance(lease, QueuedLease) and not nodes)


def bookings(state: PoolState, scope: Scope) -> list[Booking]:
    """The bookings of GPUs within the scope."""
    return [
        booking
        for booking in state.bookings.values()
        if scope.node is None or any(key.node == scope.node for key in booking.gpus)
    ]
