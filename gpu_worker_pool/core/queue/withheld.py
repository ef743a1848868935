"""Which GPUs are kept from a waiter: booked for others, reserved for the first waiter, or about to be another's.

A booked or reserved GPU may be used until its date by a request whose time limit ends before. Before a booking it may
also be used by preemptible leases, which are ended in time, and by requests without a limit that will probably have ended:
else a booking next week would keep its GPUs from nearly all today. A later start leaves room before a booking for its GPUs to
drain: otherwise a waiter whose time limit just fits would slip behind the booking.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nextafter

from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease, Reservation
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.model.waiting import RequestClass

from .owners import Order, predicted_s, quota_verdict, time_limit_of, too_heavy
from .verdicts import Verdict, verdict

# How long a lease without a limit lasts before a booking, where nothing is known of its owner.
UNKNOWN_LASTS_S = 3600.0
# An ordinary request, which says nothing about itself.
ORDINARY = RequestClass(Wishes())


class Withheld:
    """The GPUs that are kept at one instant. A pass over the queue sets the reservation once it is known: it binds only
    the waiters behind the one that has it.
    """

    def __init__(self, state: PoolState, now: float) -> None:
        self._state = state
        self._now = now
        # Of each GPU, in the order in which they begin.
        self._bookings: dict[GpuKey, list[Booking]] = {}
        for booking in sorted(state.bookings.values(), key=lambda each: each.starts_at):
            for key in booking.gpus:
                self._bookings.setdefault(key, []).append(booking)
        self._from: dict[RequestClass, frozenset[GpuKey]] = {}
        self.reservation: Reservation | None = None

    @property
    def has_bookings(self) -> bool:
        return bool(self._bookings)

    def kept_from(self, request_class: RequestClass) -> frozenset[GpuKey]:
        kept = self._booked_from(request_class) if self._bookings or self._state.quotas else frozenset()
        return kept if self.reservation is None else kept | self.reserved_from(request_class)

    def reserved_from(self, request_class: RequestClass) -> frozenset[GpuKey]:
        """The GPUs that the reservation keeps from these waiters."""
        reservation = self.reservation
        if reservation is None or self._ends_by(request_class, self._now, reservation.date):
            return frozenset()
        return frozenset(key for key in reservation.gpus if not self._is_booked_by(request_class.owner, key))

    def _booked_from(self, request_class: RequestClass) -> frozenset[GpuKey]:
        if request_class not in self._from:
            booked = (
                key
                for key, bookings in self._bookings.items()
                if any(self.keeps(booking, request_class, self._now) for booking in bookings)
            )
            self._from[request_class] = too_heavy(self._state, request_class).union(booked)
        return self._from[request_class]

    def bookings_of(self, key: GpuKey) -> Sequence[Booking]:
        return self._bookings.get(key, ())

    def keeps(self, booking: Booking, request_class: RequestClass, now: float, late_s: float = 0.0) -> bool:
        """Whether a booking keeps its GPUs from a waiter that may be this late."""
        state = self._state
        starts = booking.starts_at - state.wall_offset_s
        if booking.owner is not None and booking.owner == request_class.owner:
            return False
        if booking.ends_at is not None and booking.ends_at - state.wall_offset_s <= now:
            return False
        if request_class.preemptible and now + late_s < starts - state.settings.preempt_grace_s:
            return False
        limit_s = time_limit_of(state, request_class.owner, request_class.time_limit_s)
        lasts_s = limit_s or predicted_s(state, request_class.owner) or UNKNOWN_LASTS_S
        if request_class.preemptible and limit_s is None:
            lasts_s = inf  # it would be told to make room at once
        return now + late_s + lasts_s > starts

    def _is_booked_by(self, owner: str | None, key: GpuKey) -> bool:
        """Whether a GPU is an owner's now, by a booking: no reservation keeps it from that owner."""
        wall_now = self._now + self._state.wall_offset_s
        return owner is not None and any(
            booking.owner == owner
            and booking.starts_at <= wall_now
            and (booking.ends_at is None or wall_now < booking.ends_at)
            for booking in self.bookings_of(key)
        )

    def _ends_by(self, request_class: RequestClass, now: float, date: float) -> bool:
        """Whether a lease that is granted now has ended by a date, whatever its holder does."""
        limit_s = time_limit_of(self._state, request_class.owner, request_class.time_limit_s)
        return limit_s is not None and now + limit_s <= date

    def change_at(self) -> float:
        """Until when no booking begins or ends, and none needs its GPUs back from preemptible leases."""
        times = []
        for booking in self._state.bookings.values():
            starts = booking.starts_at - self._state.wall_offset_s
            times += [starts - self._state.settings.preempt_grace_s, starts]
            if booking.ends_at is not None:
                times.append(booking.ends_at - self._state.wall_offset_s)
        return just_before(min((at for at in times if at > self._now), default=inf))

    def why_kept(self, key: GpuKey, lease: QueuedLease) -> Verdict | None:
        """For what a GPU is kept from a waiter; None if it is not."""
        state, reservation = self._state, self._state.reservation
        if reservation is not None:
            order = Order(state, self._now)
            if not order.place_of(state.queued(reservation.lease_id)) < order.place_of(lease):
                reservation = None
        return self._why_kept(key, state.queue.class_of(lease.id), reservation, lease.id)

    def why_kept_from_newcomer(self, key: GpuKey) -> Verdict | None:
        """For what a GPU is kept from an ordinary request, which would be the last in the queue."""
        return self._why_kept(key, ORDINARY, self._state.reservation, None)

    def _why_kept(
        self, key: GpuKey, request_class: RequestClass, reservation: Reservation | None, lease_id: str | None
    ) -> Verdict | None:
        state, claimer = self._state, self._state.claims.get(key, lease_id)
        if claimer is not None and claimer != lease_id:
            who = state.queued(claimer).request.who
            return verdict("held", for_lease_id=claimer, for_holder=who, from_at=None)
        if (
            reservation is not None
            and key in reservation.gpus
            and not self._ends_by(request_class, self._now, reservation.date)
            and not self._is_booked_by(request_class.owner, key)
        ):
            first = state.queued(reservation.lease_id)
            date = reservation.date + state.wall_offset_s
            return verdict("held", for_lease_id=first.id, for_holder=first.request.who, from_at=date)
        for booking in self.bookings_of(key):
            if self.keeps(booking, request_class, self._now):
                return verdict(
                    "booked",
                    booking_id=booking.id,
                    owner=booking.owner,
                    starts_at=booking.starts_at,
                    ends_at=booking.ends_at,
                    reason=booking.reason,
                    within_s=max(booking.starts_at - state.wall_offset_s - self._now, 0.0),
                )
        # No booking keeps it, so what keeps it is the owner's quota.
        return quota_verdict(state, request_class.owner) if key in self._booked_from(request_class) else None


def just_before(at: float) -> float:
    """The last time at which what changes at `at` is still as it was."""
    return nextafter(at, -inf) if at < inf else inf
