"""The node at a glance: its GPUs with state and reason, the leases, the queue."""

from __future__ import annotations

from itertools import islice

from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.host.clock import iso_time, machine_fingerprint
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.target import Target
from gpu_worker_pool.server.loop_share import LoopShare
from gpu_worker_pool.wire.leases import LeaseView
from gpu_worker_pool.wire.pool import PoolGpu, PoolView, ThresholdsView

from .gpu_view import gpu_view, slot_order
from .lease_view import listed_leases
from .plan_view import booking_views, reservation_view
from .scoped import holders, waiters


async def pool_view(
    pool: Pool, target: Target, most_queued: int | None = None, most_leases: int | None = None
) -> PoolView:
    """What a target has, with at most this many waiters and other leases. It yields to other work in between."""
    await pool.caught_up()
    state, share = pool.state, LoopShare()
    others, waiting = holders(state, target), waiters(state, target, pool.now())
    queue: list[LeaseView] = []
    leases: list[LeaseView] = []
    async for lease, view in listed_leases(pool, [*islice(waiting, most_queued), *islice(others, most_leases)], share):
        # By its present state, so that each lease is in exactly one list, whatever happens in between.
        (queue if isinstance(lease, QueuedLease) else leases).append(view)
    gpus: list[PoolGpu] = []
    for slot in sorted(state.slots_on(target.node), key=slot_order):
        gpus.append(gpu_view(pool, slot))
        await share.yield_if_due()
    limits = state.settings.thresholds
    return PoolView(
        node=target.name(pool.node),
        gpus=tuple(gpus),
        thresholds=ThresholdsView(memory_percent=limits.memory_percent, utilization_percent=limits.utilization_percent),
        queue_length=len(waiting),
        server_id=pool.id,
        pool_id=pool.pool_id,
        # A box passes calls on to the leader, which is on another machine.
        machine=machine_fingerprint() if target.node in {None, pool.node} and not target.is_fleet else None,
        ignored_processes=tuple(sorted(state.ignored_processes)),
        can_grant=pool.trouble is None,
        trouble=pool.trouble,
        now=iso_time(pool.wall_now()) if pool.is_open else None,
        timestamp=pool.snapshot.timestamp,
        source=pool.snapshot.source,
        leases=tuple(leases),
        queue=tuple(queue),
        reservation=reservation_view(state, target),
        bookings=booking_views(state, target),
        fleet=pool.fleet(),
    )
