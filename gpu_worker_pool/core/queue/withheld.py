"""Which GPUs are kept from a waiter: booked for others, reserved for the first waiter, or about to be another's; and those on
which a group has first right, while a member waits for them.

A booked or reserved GPU may be used until its date by a request whose time limit ends before. Before a booking it may
also be used by preemptible leases, which are ended in time, and by requests without a limit that will probably have ended:
else a booking next week would keep its GPUs from nearly all today. A later start leaves room before a booking for its GPUs to
drain: otherwise a waiter whose time limit just fits would slip behind the booking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf, nextafter

from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease, Reservation
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.model.waiting import RequestClass

from .eligibility import is_suitable
from .owners import Order, over_quota, predicted_s, quota_verdict, time_limit_of, too_heavy
from .verdicts import Verdict, verdict

# How long a lease without a limit lasts before a booking, where nothing is known of its owner.
UNKNOWN_LASTS_S = 3600.0
# An ordinary request, which says nothing about itself.
ORDINARY = RequestClass(Wishes())


class Withheld:
    """The GPUs that are kept at one instant. A pass over the queue sets the reservation once it is known: it binds only
    the waiters behind the one that has it.
    """

    def __init__(self, state: PoolState, now: float, newcomer: QueuedLease | None = None) -> None:
        self._state = state
        self._now = now
        self._newcomer = newcomer
        # Of each GPU, in the order in which they begin.
        self._bookings: dict[GpuKey, list[Booking]] = {}
        for booking in sorted(state.bookings.values(), key=lambda each: each.starts_at):
            for key in booking.gpus:
                self._bookings.setdefault(key, []).append(booking)
        self._from: dict[RequestClass, frozenset[GpuKey]] = {}
        self._first: dict[RequestClass, dict[GpuKey, str]] = {}
        self.reservation: Reservation | None = None

    @property
    def has_bookings(self) -> bool:
        return bool(self._bookings)

    def kept_from(self, request_class: RequestClass) -> frozenset[GpuKey]:
        is_any = self._bookings or self._state.quotas or self._state.groups
        kept = self._booked_from(request_class) if is_any else frozenset()
        return kept if self.reservation is None else kept | self.reserved_from(request_class, self.reservation)

    def reserved_from(self, request_class: RequestClass, reservation: Reservation | None) -> frozenset[GpuKey]:
        """The GPUs that a reservation keeps from waiters of this class."""
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
            first = self.first_right_from(request_class)
            self._from[request_class] = too_heavy(self._state, request_class).union(booked, first)
        return self._from[request_class]

    def first_right_from(self, request_class: RequestClass) -> Mapping[GpuKey, str]:
        """The GPUs that are kept for members of a group that wait, and its name. What members that are not preemptible wait for
        is not kept from preemptible requests: these make room.
        """
        if request_class not in self._first:
            self._first[request_class] = found = dict[GpuKey, str]()
            for name, group in self._state.groups.items():
                members = () if request_class.owner in group.members else group.members
                asked = {
                    each.wishes
                    for each in self._asking
                    if each.owner in members and (each.preemptible or not request_class.preemptible)
                }
                for key in group.first_right if asked else ():
                    slot = self._state.slots.get(key)
                    if slot is not None and any(is_suitable(self._state, slot, wishes) for wishes in asked):
                        found[key] = name
        return self._first[request_class]

    @cached_property
    def _asking(self) -> list[RequestClass]:
        """The classes of the waiters that may be served. A newcomer is one of them."""
        state, new = self._state, self._newcomer
        waiting = {each for lease_id, each in state.queue.class_of.items() if lease_id not in state.passed_over}
        classes = [*waiting, *([] if new is None else [state.queue.class_for(new.request)])]
        return [each for each in classes if over_quota(state, each) is None]

    def bookings_of(self, key: GpuKey) -> Sequence[Booking]:
        return self._bookings.get(key, ())

    def keeps(self, booking: Booking, request_class: RequestClass, now: float, late_s: float = 0.0) -> bool:
        """Whether a booking keeps its GPUs from a waiter that may be this late."""
        state = self._state
        starts, ends = state.span_of(booking)
        if ends <= now or (booking.owner is not None and booking.owner == request_class.owner):
            return False
        if request_class.preemptible and now + late_s < starts - state.settings.preempt_grace_s:
            return False
        limit_s = time_limit_of(state, request_class.owner, request_class.time_limit_s)
        lasts_s = limit_s or predicted_s(state, request_class.owner) or UNKNOWN_LASTS_S
        if request_class.preemptible and limit_s is None:
            lasts_s = inf  # it would be told to make room at once
        return now + late_s + lasts_s > starts

    def _is_booked_by(self, owner: str | None, key: GpuKey) -> bool:
        """Whether this owner has booked the GPU for now: then a reservation does not keep it from that owner."""
        own = [booking for booking in self.bookings_of(key) if owner is not None and booking.owner == owner]
        return any(starts <= self._now < ends for starts, ends in map(self._state.span_of, own))

    def _ends_by(self, request_class: RequestClass, now: float, date: float) -> bool:
        """Whether a lease that is granted now has ended by a date, whatever its holder does."""
        limit_s = time_limit_of(self._state, request_class.owner, request_class.time_limit_s)
        return limit_s is not None and now + limit_s <= date

    def change_at(self) -> float:
        """Until when no booking begins or ends, and none needs its GPUs back from preemptible leases."""
        times: list[float] = []
        for starts, ends in map(self._state.span_of, self._state.bookings.values()):
            times += [starts - self._state.settings.preempt_grace_s, starts, ends]
        return just_before(min((at for at in times if at > self._now), default=inf))

    def why_kept(self, key: GpuKey, lease: QueuedLease) -> Verdict | None:
        """For what a GPU is kept from a waiter; None if it is not."""
        state, reservation = self._state, self._state.reservation
        if reservation is not None:
            order = Order(state, self._now)
            if not order.place_of(state.queued(reservation.lease_id)) < order.place_of(lease):
                reservation = None
        return self._why_kept(key, state.queue.class_of[lease.id], reservation, lease.id)

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
        if reservation is not None and key in self.reserved_from(request_class, reservation):
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
                    within_s=max(state.span_of(booking)[0] - self._now, 0.0),
                )
        if (group := self.first_right_from(request_class).get(key)) is not None:
            return verdict("first_right", group=group)
        # Nothing else keeps it, so what keeps it is the owner's quota.
        return quota_verdict(state, request_class.owner) if key in self._booked_from(request_class) else None


def just_before(at: float) -> float:
    """The last time at which what changes at `at` is still as it was."""
    return nextafter(at, -inf) if at < inf else inf
