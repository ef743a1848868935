"""What a call means, the box that was asked or the whole fleet, with its leases and bookings; and the pool that views show: that of
this server, or what a box without a leader knows by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.lease import Lease, QueuedLease
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.owners import Order
from gpu_worker_pool.core.queue.planner import FreeAt
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.server.authority.pool import Pool

if TYPE_CHECKING:
    from gpu_worker_pool.server.agent.agent import Agent


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


class KeptPool:
    """What a box without a leader knows: its GPUs as it reads them, and the leases that it keeps."""

    is_open = True

    def __init__(self, pool: Pool, membership: Agent) -> None:
        self.id, self.node, self.pool_id = pool.id, pool.node, membership.pool_id
        self.state = membership.kept_pool(pool.state.settings)
        self.snapshot = pool.snapshot
        self.trouble = membership.why_waiting
        self.fleet = pool.fleet

    def now(self) -> float:
        return boot_time()

    def wall_now(self) -> float:
        return time.time()

    def is_written(self, lease_id: str) -> bool:  # noqa: ARG002 - all that it keeps is on its disk
        return True

    async def caught_up(self) -> None:
        """Nothing is being written that it shows."""

    async def expected_starts(self, _: LoopShare) -> Mapping[str, FreeAt]:
        return {}


# What views show: the names of `KeptPool` are those of `Pool`.
ShownPool = Pool | KeptPool
