"""Views of what is planned: bookings, and the reservation of the first waiter."""

from __future__ import annotations

from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.bookings import late_leases
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.views.target import Target
from gpu_worker_pool.wire.plans import BookingView, ReservationView

from .lease_view import gpu_ref
from .scoped import bookings


def booking_views(state: PoolState, scope: Target) -> tuple[BookingView, ...]:
    """The bookings within a scope, the earliest first."""
    ordered = sorted(bookings(state, scope), key=lambda booking: (booking.starts_at, booking.id))
    return tuple(booking_view(state, booking) for booking in ordered)


def booking_view(state: PoolState, booking: Booking) -> BookingView:
    return BookingView(
        id=booking.id,
        gpus=tuple(gpu_ref(state, key) for key in booking.gpus),
        starts_at=iso_time(booking.starts_at) or "",
        ends_at=iso_time(booking.ends_at),
        owner=booking.owner,
        reason=booking.reason,
        booked_by=booking.by,
        late_holders=tuple(late_leases(state, booking)),
    )


def reservation_view(state: PoolState, scope: Target) -> ReservationView | None:
    """The reservation, if it is of GPUs within the scope."""
    reservation = state.reservation
    if reservation is None or scope.node not in {None, *reservation.nodes}:
        return None
    after = state.find(reservation.after) if reservation.after else None
    return ReservationView(
        lease_id=reservation.lease_id,
        holder=state.queued(reservation.lease_id).request.who,
        gpus=tuple(gpu_ref(state, key) for key in reservation.gpus),
        starts_at=iso_time(reservation.date + state.wall_offset_s) or "",
        basis=str(reservation.basis),  # type: ignore[arg-type]
        after=after.request.who if after else None,
    )
