"""The node at a glance: its GPUs with state and reason, the leases, the queue."""

from __future__ import annotations

from itertools import islice

from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.bookings import late_leases
from gpu_worker_pool.host.clock import iso_time, machine_fingerprint
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.loop_share import LoopShare
from gpu_worker_pool.server.views.target import Target
from gpu_worker_pool.wire.leases import LeaseView
from gpu_worker_pool.wire.plans import BookingView, ReservationView
from gpu_worker_pool.wire.pool import PoolGpu, PoolView, ThresholdsView

from .gpu_view import gpu_view, slot_order
from .lease_view import gpu_refs, listed_leases


async def pool_view(
    pool: Pool, target: Target, most_queued: int | None = None, most_leases: int | None = None
) -> PoolView:
    """What a target has, with at most this many waiters and other leases. It yields to other work in between."""
    await pool.caught_up()
    state, share = pool.state, LoopShare()
    others, waiting = target.holders(state), target.waiters(state, pool.now())
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
        reservation=_reservation_view(state, target),
        bookings=booking_views(state, target),
        fleet=pool.fleet(),
    )


def booking_views(state: PoolState, target: Target) -> tuple[BookingView, ...]:
    return tuple(booking_view(state, booking) for booking in target.bookings(state))


def booking_view(state: PoolState, booking: Booking) -> BookingView:
    return BookingView(
        id=booking.id,
        gpus=gpu_refs(state, booking.gpus),
        starts_at=iso_time(booking.starts_at) or "",
        ends_at=iso_time(booking.ends_at),
        owner=booking.owner,
        reason=booking.reason,
        booked_by=booking.by,
        late_holders=tuple(late_leases(state, booking)),
    )


def _reservation_view(state: PoolState, target: Target) -> ReservationView | None:
    """The reservation, if it is of GPUs of the target."""
    reservation = state.reservation
    if reservation is None or target.node not in {None, *reservation.nodes}:
        return None
    after = state.find(reservation.after) if reservation.after else None
    return ReservationView(
        lease_id=reservation.lease_id,
        holder=state.queued(reservation.lease_id).request.who,
        gpus=gpu_refs(state, reservation.gpus),
        starts_at=iso_time(reservation.date + state.wall_offset_s) or "",
        basis=str(reservation.basis),  # type: ignore[arg-type]
        after=after.request.who if after else None,
    )
