"""What a call means, the box that was asked or the whole fleet, and the leases and bookings of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.lease import Lease, QueuedLease
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.owners import Order


@dataclass(frozen=True, slots=True)
class Target:
    """A call with a `node` means the GPUs of that node; without one, all that there are. A server without a fleet has only
    those of its own box, also under a name that the box had before.
    """

    node: str | None = None
    is_fleet: bool = False

    def name(self, own: str) -> str | None:
        """The node as an answer names it, on a box of this name; None for a whole fleet."""
        return None if self.is_fleet else self.node or own

    def waiters(self, state: PoolState, now: float) -> list[str]:
        """The waiters that its GPUs may serve, the next one first."""
        return list(Order(state, now).lease_ids(self.node))

    def first_waiters(self, state: PoolState, now: float, most: int) -> tuple[list[str], int]:
        """The first of them, at most this many, and how many there are. Without a fair share, no other waiter is looked at."""
        if self.node is not None or state.settings.fair_share:
            waiting = self.waiters(state, now)
            return waiting[:most], len(waiting)
        return list(islice(state.queue, most)), len(state.queue)

    def holders(self, state: PoolState) -> Iterator[str]:
        """The leases that have GPUs of it, also those that drain."""
        if self.node is None:
            return (id_ for id_, lease in state.leases.items() if not isinstance(lease, QueuedLease))
        return iter(dict.fromkeys(id_ for slot in state.slots_on(self.node) for id_ in slot.occupants))

    def live_leases(self, state: PoolState, now: float) -> list[str]:
        return list(state.leases) if self.node is None else [*self.holders(state), *self.waiters(state, now)]

    def bookings(self, state: PoolState) -> list[Booking]:
        """The bookings of its GPUs, the earliest first."""
        found = [
            booking
            for booking in state.bookings.values()
            if self.node is None or any(key.node == self.node for key in booking.gpus)
        ]
        return sorted(found, key=lambda booking: (booking.starts_at, booking.id))


EVERYTHING = Target()
FLEET = Target(is_fleet=True)


def nodes_of(lease: Lease) -> frozenset[str]:
    """The nodes that a lease is on. A waiter, or a lease that ended as one, is on the one that it asked for, if it asked for
    one.
    """
    if not isinstance(lease, QueuedLease) and lease.gpus:
        return frozenset(key.node for key in lease.gpus)
    return frozenset() if lease.request.wishes.node is None else frozenset({lease.request.wishes.node})
