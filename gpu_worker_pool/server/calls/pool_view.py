"""The node at a glance: its GPUs with state and reason, the leases, the queue."""

from __future__ import annotations

from itertools import islice

from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.host.clock import iso_time, machine_fingerprint
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.loop_share import LoopShare
from gpu_worker_pool.server.http.response import encode_with
from gpu_worker_pool.server.http.scope import Scope
from gpu_worker_pool.wire.pool import PoolView, ThresholdsView

from .gpu_frames import GpuFrames
from .gpu_view import slot_order
from .lease_frames import LeaseFrames
from .plan_view import booking_views, reservation_view
from .scoped import holders, waiters


class PoolFrames:
    """What is encoded already of a pool. All answers share it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.leases = LeaseFrames(pool)
        self.gpus = GpuFrames(pool)


async def encode_pool(
    frames: PoolFrames,
    scope: Scope,
    most_queued: int | None,
    most_leases: int | None = None,
    *,
    loop_share: LoopShare | None = None,
    most_gpus: int | None = None,
) -> bytes:
    """Encode what a scope has, with at most so many waiters, other leases and GPUs. It yields to other work in between."""
    pool = frames.pool
    await pool.caught_up()
    state, loop_share = pool.state, loop_share or LoopShare()
    others, waiting = holders(state, scope), waiters(state, scope, pool.now())
    queue: list[bytes] = []
    leases: list[bytes] = []
    shown = [*islice(waiting, most_queued), *islice(others, most_leases)]
    async for lease, view in frames.leases.encode(shown, loop_share):
        # By its present state, so that each lease is in exactly one list, whatever happens in between.
        (queue if isinstance(lease, QueuedLease) else leases).append(view)
    gpus = []
    ordered = sorted(state.slots_on(scope.node), key=slot_order)
    await loop_share.yield_if_due()
    for slot in islice(ordered, most_gpus):
        gpus.append(frames.gpus.encode(slot))
        await loop_share.yield_if_due()
    limits = state.settings.thresholds
    return encode_with(
        PoolView(
            node=scope.name(pool.node),
            gpus=(),
            thresholds=ThresholdsView(
                memory_percent=limits.memory_percent, utilization_percent=limits.utilization_percent
            ),
            queue_length=len(waiting),
            server_id=pool.id,
            pool_id=pool.pool_id,
            # A box passes calls on to the leader, which is on another machine.
            machine=machine_fingerprint() if scope.node in {None, pool.node} and not scope.is_fleet else None,
            ignored_processes=tuple(sorted(state.ignored_processes)),
            can_grant=pool.trouble is None,
            trouble=pool.trouble,
            now=iso_time(pool.wall_now()) if pool.is_open else None,
            timestamp=pool.snapshot.timestamp,
            source=pool.snapshot.source,
            reservation=reservation_view(state, scope),
            bookings=booking_views(state, scope),
            fleet=pool.fleet(),
        ),
        gpus=gpus,
        leases=leases,
        queue=queue,
    )
