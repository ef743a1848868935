"""Which GPUs are kept from a waiter: booked for others, reserved for the first waiter, or about to be another's.

A booked or reserved GPU may be used until its date by a request whose time limit ends before. Before a booking it may
also be used by preemptible leases, which are ended in time. A later start leaves room before a booking for its GPUs to
drain: otherwise a waiter whose time limit just fits would slip behind the booking.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import partial
from math import inf, nextafter

from gpu_worker_pool.core.model.booking import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.reservation import Basis, Reservation
from gpu_worker_pool.core.model.state import PoolState

from .forecast import NEVER, FreeTime, Unbooked
from .order import Order
from .quotas import time_limit_of, too_heavy, why_too_heavy
from .verdicts import Booked, HeldForAnother, OverCeiling, OverQuota
from .waiting import Line

ORDINARY = Line(Wishes(), None, preemptible=False, owner=None)


class Keeps:
    """The GPUs that are kept at one instant. A pass over the queue sets the reservation once it is known: it binds only
    the waiters behind the one that has it.
    """

    def __init__(self, state: PoolState, now: float) -> None:
        self._state = state
        self._now = now
        self._booked = booked_gpus(state) if state.bookings else {}
        self._from: dict[Line, frozenset[GpuKey]] = {}
        self._with_reserved: dict[tuple[frozenset[GpuKey], str | None], frozenset[GpuKey]] = {}
        self.reservation: Reservation | None = None

    def kept_from(self, line: Line) -> frozenset[GpuKey]:
        reservation = self.reservation
        if reservation is None and not self._booked and not self._state.quotas:
            return frozenset()  # nothing is kept from any waiter
        booked = self.booked_from(line) | too_heavy(self._state, line)
        if reservation is None or ends_by(self._state, line, self._now, reservation.date):
            return booked
        # Only an owner of bookings is treated differently from others.
        case = (booked, line.owner if self._booked else None)
        if case not in self._with_reserved:
            reserved = [key for key in reservation.gpus if not self._is_booked_by(line.owner, key)]
            self._with_reserved[case] = booked.union(reserved)
        return self._with_reserved[case]

    def booked_from(self, line: Line) -> frozenset[GpuKey]:
        if not self._booked:
            return frozenset()
        if line not in self._from:
            self._from[line] = frozenset(
                key
                for key, bookings in self._booked.items()
                if any(keeps_from(self._state, booking, line, self._now) for booking in bookings)
            )
        return self._from[line]

    def unbooked(self, line: Line, reserved: Container[GpuKey] = ()) -> Unbooked:
        """When GPUs are free of the bookings that keep them from a waiter, for which these are reserved already."""
        return partial(self._unbooked, line, reserved) if self._booked else None

    def _unbooked(self, line: Line, reserved: Container[GpuKey], key: GpuKey, free: FreeTime) -> FreeTime:
        state, bookings, offset_s = self._state, self._booked.get(key, ()), self._state.wall_offset_s

        def keeps(booking: Booking) -> bool:
            # The waiter starts later by what GPUs drain. The reserved ones that drain now had room for that at their date.
            is_late = free.at > self._now or key not in reserved
            return keeps_from(state, booking, line, free.at, state.settings.drain_limit_s if is_late else 0.0)

        while booking := next(filter(keeps, bookings), None):
            if booking.ends_at is None:
                return NEVER
            free = FreeTime(booking.ends_at - offset_s, free.basis)
        if any(each.owner not in {None, line.owner} and each.starts_at - offset_s < free.at for each in bookings):
            return free._replace(basis=max(free.basis, Basis.PREDICTED))  # leases of its owner may last for longer
        return free

    def _is_booked_by(self, owner: str | None, key: GpuKey) -> bool:
        return is_booked_by(self._state, owner, self._booked.get(key, ()), self._now)

    def change_at(self) -> float:
        """Until when no booking begins or ends."""
        if not self._booked:
            return inf
        return just_before(min((at for at in booking_times(self._state) if at > self._now), default=inf))


WhyKept = HeldForAnother | Booked | OverQuota | OverCeiling


def why_kept(state: PoolState, key: GpuKey, lease: QueuedLease, now: float) -> WhyKept | None:
    """For what a GPU is kept from a waiter; None if it is not."""
    reservation, line = state.reservation, state.queue.line_of(lease)
    if reservation is not None:
        order, first = Order(state, now), state.queued(reservation.lease_id)
        if not order.place_of(first) < order.place_of(lease):
            reservation = None
    return _why_kept(state, key, line, reservation, lease.id, now)


def why_kept_from_newcomer(state: PoolState, key: GpuKey, now: float) -> WhyKept | None:
    """For what a GPU is kept from an ordinary request, which would be the last in the queue."""
    return _why_kept(state, key, ORDINARY, state.reservation, None, now)


def _why_kept(  # noqa: PLR0917 - two questions, one answer
    state: PoolState, key: GpuKey, line: Line, reservation: Reservation | None, lease_id: str | None, now: float
) -> WhyKept | None:
    claimer = state.claims.get(key, lease_id)
    if claimer is not None and claimer != lease_id:
        return HeldForAnother(claimer, state.queued(claimer).request.who)
    bookings = booked_gpus(state).get(key, ())
    if (
        reservation is not None
        and key in reservation.gpus
        and not ends_by(state, line, now, reservation.date)
        and not is_booked_by(state, line.owner, bookings, now)
    ):
        first = state.queued(reservation.lease_id)
        return HeldForAnother(first.id, first.request.who, reservation.date + state.wall_offset_s)
    for booking in bookings:
        if keeps_from(state, booking, line, now):
            return Booked(booking.id, booking.owner, booking.starts_at, booking.ends_at, booking.reason)
    return why_too_heavy(state, key, line)


def just_before(at: float) -> float:
    """The last time at which what changes at `at` is still as it was."""
    return nextafter(at, -inf) if at < inf else inf


def booked_gpus(state: PoolState) -> Mapping[GpuKey, list[Booking]]:
    found: dict[GpuKey, list[Booking]] = {}
    for booking in state.bookings.values():
        for key in booking.gpus:
            found.setdefault(key, []).append(booking)
    return found


def booking_times(state: PoolState) -> list[float]:
    """When bookings begin, end, and need their GPUs back from preemptible leases; on the pool's clock."""
    times = []
    for booking in state.bookings.values():
        starts = booking.starts_at - state.wall_offset_s
        times += [starts - state.settings.preempt_grace_s, starts]
        if booking.ends_at is not None:
            times.append(booking.ends_at - state.wall_offset_s)
    return times


def keeps_from(state: PoolState, booking: Booking, line: Line, now: float, late_s: float = 0.0) -> bool:
    """Whether a booking keeps its GPUs from a waiter that may be so late."""
    starts = booking.starts_at - state.wall_offset_s
    if booking.owner is not None and booking.owner == line.owner:
        return False
    if booking.ends_at is not None and booking.ends_at - state.wall_offset_s <= now:
        return False
    if line.preemptible and now + late_s < starts - state.settings.preempt_grace_s:
        return False
    return not ends_by(state, line, now + late_s, starts)


def is_booked_by(state: PoolState, owner: str | None, bookings: Iterable[Booking], now: float) -> bool:
    """Whether a GPU is an owner's now, by one of these bookings: no reservation keeps it from that owner."""
    wall_now = now + state.wall_offset_s
    return owner is not None and any(
        booking.owner == owner
        and booking.starts_at <= wall_now
        and (booking.ends_at is None or wall_now < booking.ends_at)
        for booking in bookings
    )


def ends_by(state: PoolState, line: Line, now: float, date: float) -> bool:
    """Whether a lease that is granted now has ended by a date, whatever its holder does."""
    limit_s = time_limit_of(state, line.owner, line.time_limit_s)
    return limit_s is not None and now + limit_s <= date
