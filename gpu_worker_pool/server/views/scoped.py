"""The leases and waiters that a call means: those of the box that was asked, or all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.lease import Lease, QueuedLease
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.owners import Order
from gpu_worker_pool.server.views.target import Target


def waiters(state: PoolState, scope: Target, now: float) -> list[str]:
    """The waiters that GPUs within the scope may serve, the next one first."""
    return list(Order(state, now).lease_ids(scope.node))


def first_waiters(state: PoolState, scope: Target, now: float, most: int) -> tuple[list[str], int]:
    """The first of them, at most this many, and how many there are. Without a fair share, no other waiter is looked at."""
    if scope.node is not None or state.settings.fair_share:
        waiting = waiters(state, scope, now)
        return waiting[:most], len(waiting)
    return list(islice(state.queue, most)), len(state.queue)


def holders(state: PoolState, scope: Target) -> Iterator[str]:
    """The leases that have GPUs within the scope, also those that drain."""
    if scope.node is None:
        return (id_ for id_, lease in state.leases.items() if not isinstance(lease, QueuedLease))
    return iter(dict.fromkeys(id_ for slot in state.slots_on(scope.node) for id_ in slot.occupants))


def live_leases(state: PoolState, scope: Target, now: float) -> list[str]:
    """All live leases within the scope."""
    return list(state.leases) if scope.node is None else [*holders(state, scope), *waiters(state, scope, now)]


def nodes_of(lease: Lease) -> frozenset[str]:
    """The nodes that a lease is on. A waiter, or a lease that ended as one, is on the one that
    it asked for, if it asked for one."""
    if not isinstance(lease, QueuedLease) and lease.gpus:
        return frozenset(key.node for key in lease.gpus)
    return frozenset() if lease.request.wishes.node is None else frozenset({lease.request.wishes.node})


def bookings(state: PoolState, scope: Target) -> list[Booking]:
    """The bookings of GPUs within the scope."""
    return [
        booking
        for booking in state.bookings.values()
        if scope.node is None or any(key.node == scope.node for key in booking.gpus)
    ]
