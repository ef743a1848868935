"""Views of what is planned: bookings, and the reservation of the first waiter."""

from __future__ import annotations

from gpu_worker_pool.core.model.booking import Booking
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.booking import late_leases
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.wire.plans import BookingView, ReservationView

from .lease_view import gpu_ref


def booking_views(state: PoolState) -> tuple[BookingView, ...]:
    """All bookings, the earliest first."""
    ordered = sorted(state.bookings.values(), key=lambda booking: (booking.starts_at, booking.id))
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


def reservation_view(state: PoolState) -> ReservationView | None:
    reservation = state.reservation
    if reservation is None:
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
