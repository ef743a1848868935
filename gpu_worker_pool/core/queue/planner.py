"""When GPUs become free, as far as that is known.

A lease ends at its declared time limit, and its GPUs are free then: what its processes hold on to is not foreseen, so
that no request is admitted meanwhile to GPUs that wait for them. A lease without a limit is predicted to last as long as its
owner's last two leases did in the mean, twice as long once it has lasted longer, and so on. A prediction never admits a
request: nothing ends a lease that overstays it. A booked GPU is free when the booking ends.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from heapq import nsmallest
from math import inf
from typing import NamedTuple

from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import Basis, EndedLease, QueuedLease, Reservation
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.model.waiting import RequestClass

from .eligibility import Departures, has_opening, is_suitable, judge
from .owners import predicted_s, time_limit_of
from .withheld import Withheld

# The GPUs whose leases are looked at for one pass over the queue, or for the starts of all waiters: meanwhile no caller is
# answered.
MOST_GPUS = 4_000


class FreeAt(NamedTuple):
    """A time on the pool's clock. It is infinite, and its basis unknown, if nothing tells. `after` is the lease whose end
    it is.
    """

    at: float
    basis: Basis
    after: str | None = None


NEVER = FreeAt(inf, Basis.UNKNOWN)
# When a GPU is free, its place and its key.
FreeGpu = tuple[FreeAt, float, GpuKey]


class Plan(NamedTuple):
    """The GPUs that are free first, of each node as many as are wished for, and when the last of them is."""

    start: FreeAt
    gpus: tuple[GpuKey, ...]


class Planner:
    """What can be told at one instant."""

    def __init__(self, state: PoolState, now: float, withheld: Withheld) -> None:
        self._state = state
        self._now = now
        self._withheld = withheld
        self._ends: dict[str, FreeAt] = {}

    def duration_of(self, owner: str | None, declared_s: float | None) -> FreeAt:
        """How long a lease of this owner lasts."""
        limit_s = time_limit_of(self._state, owner, declared_s)
        return self._predicted(owner) if limit_s is None else FreeAt(limit_s, Basis.DECLARED)

    def _predicted(self, owner: str | None) -> FreeAt:
        lasts_s = predicted_s(self._state, owner)
        return NEVER if lasts_s is None else FreeAt(lasts_s, Basis.PREDICTED)

    def end_of(self, lease_id: str) -> FreeAt:
        if lease_id not in self._ends:
            self._ends[lease_id] = self._end_of(lease_id)
        return self._ends[lease_id]

    def _end_of(self, lease_id: str) -> FreeAt:
        state = self._state
        if isinstance(state.leases[lease_id], EndedLease):
            return FreeAt(self._now, Basis.DECLARED, lease_id)
        lease = state.active(lease_id)
        if (ends := lease.ends) is not None:
            return FreeAt(max(ends, self._now), Basis.DECLARED, lease_id)
        # Its owner may have a limit since the grant, which does not bind it.
        lasts_s, basis, _ = self._predicted(lease.request.holder.owner)
        if basis is Basis.UNKNOWN:
            return NEVER
        lasted_s = max(self._now + state.wall_offset_s - lease.granted_at, 0.0)
        while lasts_s <= lasted_s:
            lasts_s *= 2
        return FreeAt(self._now - lasted_s + lasts_s, Basis.PREDICTED, lease_id)

    def usable_from(self, slot: GpuSlot, wishes: Wishes) -> FreeAt:
        """When the leases on a GPU will have left enough of it for these wishes."""
        # To judge a GPU takes far longer than to see that its leases admit no other.
        if has_opening(self._state, slot, wishes) and judge(self._state, slot, wishes, self._now).is_eligible:
            return FreeAt(self._now, Basis.DECLARED)
        if not slot.occupants:
            return NEVER  # what keeps it ends at no known time
        departures, basis = Departures(self._state, slot, wishes, self._now), Basis.DECLARED
        if not departures.can_do:
            return NEVER
        for end, lease_id in sorted((self.end_of(lease_id), lease_id) for lease_id in slot.occupants):
            if end.at == inf:
                return NEVER
            basis = max(basis, end.basis)
            departures.leave(lease_id)
            if departures.would_do():
                return FreeAt(end.at, basis, lease_id)
        return NEVER

    def kept_for(
        self, lease: QueuedLease, reservation: Reservation | None, claims: Mapping[GpuKey, str]
    ) -> Plan | None:
        """The GPUs that a waiter counts on: those that are reserved for it, or that others make room on for it."""
        if reservation is not None and reservation.lease_id == lease.id:
            at = max(reservation.date, self._now)
            return Plan(FreeAt(at, reservation.basis, reservation.after), reservation.gpus)
        claimed = tuple(key for key, claimer in claims.items() if claimer == lease.id)
        if not claimed:
            return None
        free = [self.usable_from(self._state.slots[key], lease.request.wishes) for key in claimed]
        last = max(free, key=lambda each: each.at)
        return Plan(last._replace(basis=max(each.basis for each in free)), claimed)

    def expect_end(self, lease_id: str, at: float) -> None:
        """Take it as told that this lease is ended then."""
        self._ends[lease_id] = FreeAt(at, Basis.DECLARED, lease_id)

    def may_be_free(self, key: GpuKey, request_class: RequestClass) -> bool:
        """Whether a reserved GPU may be free once its leases end, though its readings do not say so now."""
        slot = self._state.slots.get(key)
        if slot is None or slot.reading is None or not is_suitable(self._state, slot, request_class.wishes):
            return False
        if key in self._withheld.first_right_from(request_class):
            return False
        ends = max((self.end_of(lease_id).at for lease_id in slot.occupants), default=self._now)
        return self._free_of_bookings(request_class, (key,), key, ends)[0] < inf

    def plan(self, request_class: RequestClass) -> Plan | None:
        """The soonest plan on any nodes; None if there is none."""
        facts, wishes = self._state.facts, request_class.wishes
        thresholds = self._state.settings.thresholds_for(wishes)
        nodes = facts.nodes_for(wishes)
        could = [name for name, node in nodes if facts.could_serve(node, wishes, thresholds, in_service=True)]
        return self.plan_on(could, request_class)

    def plan_on(
        self, nodes: Iterable[str], request_class: RequestClass, reserved: Container[GpuKey] = ()
    ) -> Plan | None:
        """The soonest plan on these nodes, where these GPUs are reserved already; None if there is none."""
        plans = [self._plan_on(node, request_class, reserved) for node in nodes]
        return together(filter(None, plans), request_class.wishes.nodes)

    def _plan_on(self, node: str, request_class: RequestClass, reserved: Container[GpuKey]) -> Plan | None:
        """The GPUs of a node that can serve its part of these wishes soonest; None if nothing tells when."""
        slots, wishes = self._state.slots_on(node), request_class.wishes
        kept = self._withheld.first_right_from(request_class)
        to_spare = len(slots) - wishes.gpus
        found: list[FreeGpu] = []
        for slot in slots:
            free = NEVER if slot.reading is None or slot.key in kept else self.usable_from(slot, wishes)
            if slot.reading is not None and free.at < inf:
                found.append((free, slot.reading.gpu.place, slot.key))
            elif to_spare <= 0:
                return None  # the others are not enough
            else:
                to_spare -= 1
        return self.soonest(found, request_class, reserved)

    def soonest(
        self, gpus: Iterable[FreeGpu], request_class: RequestClass, reserved: Container[GpuKey] = ()
    ) -> Plan | None:
        """The first of these GPUs, as many as are wished for, by when each is free; None if there are not as many."""
        number = request_class.wishes.gpus
        known = sorted((entry for entry in gpus if entry[0].at < inf), key=first_free)
        chosen = known[:number]
        if self._withheld.has_bookings:
            chosen = self._unbooked_together(known, request_class, reserved)
        if len(chosen) < number:
            return None
        basis = max(free.basis for free, _, _ in chosen)
        last = chosen[-1][0]
        by_index = tuple(key for _, _, key in sorted(chosen, key=lambda entry: entry[1]))
        return Plan(FreeAt(last.at, basis, last.after), by_index)

    def _unbooked_together(
        self, known: Sequence[FreeGpu], request_class: RequestClass, reserved: Container[GpuKey]
    ) -> list[FreeGpu]:
        """The first of them, as many as are wished for, that are free of bookings at the same time."""
        number, start = request_class.wishes.gpus, -inf
        times, passed = [free.at for free, _, _ in known], [0] * len(known)
        while True:
            for place, (_, _, key) in enumerate(known):
                times[place], passed[place] = self._free_of_bookings(
                    request_class, reserved, key, max(times[place], start), passed[place]
                )
            first = sorted(times)[:number]
            if len(first) < number or first[-1] == inf:
                return []
            if first[-1] <= start:
                break
            start = first[-1]
        found: list[FreeGpu] = []
        for at, (free, index, key) in zip(times, known, strict=True):
            if at <= start and len(found) < number:
                basis = max(free.basis, Basis.PREDICTED) if self._may_be_late(request_class, key, at) else free.basis
                found.append((FreeAt(at, basis, free.after if free.at == start else None), index, key))
        return sorted(found, key=lambda entry: entry[0].after is not None)

    def _free_of_bookings(
        self, request_class: RequestClass, reserved: Container[GpuKey], key: GpuKey, at: float, passed: int = 0
    ) -> tuple[float, int]:
        """When a GPU that is free at this time is free of the bookings that keep it from a waiter, too. Bookings come one after
        the other: those that are `passed` matter no more.
        """
        bookings = self._withheld.bookings_of(key)
        while passed < len(bookings):
            booking = bookings[passed]
            # The waiter starts later by what GPUs drain. The reserved ones that drain now had room for that at their date.
            is_late = at > self._now or key not in reserved
            late_s = self._state.settings.drain_limit_s if is_late else 0.0
            if self._withheld.keeps(booking, request_class, at, late_s):
                at = self._state.span_of(booking)[1]
            elif self._state.span_of(booking)[0] > at and not _is_own(booking, request_class):
                break  # a lease ends before it and all later ones
            passed += 1
        return at, passed

    def _may_be_late(self, request_class: RequestClass, key: GpuKey, at: float) -> bool:
        """Whether leases of an owner that has booked the GPU before may last for longer than the booking."""
        return any(
            booking.owner not in {None, request_class.owner} and self._state.span_of(booking)[0] < at
            for booking in self._withheld.bookings_of(key)
        )


def _is_own(booking: Booking, request_class: RequestClass) -> bool:
    return booking.owner is not None and booking.owner == request_class.owner


def first_free(entry: FreeGpu) -> tuple[float, float, GpuKey]:
    return (entry[0].at, *entry[1:])


def _sooner(plan: Plan) -> tuple[float, tuple[GpuKey, ...]]:
    return (plan.start.at, plan.gpus)


def together(plans: Iterable[Plan], number: int) -> Plan | None:
    """The soonest of these plans, each for a node of its own; None if there are not as many."""
    chosen = nsmallest(number, plans, key=_sooner)
    if len(chosen) < number:
        return None
    last = chosen[-1]
    if number == 1:
        return last
    basis = max(plan.start.basis for plan in chosen)
    gpus = [key for plan in sorted(chosen, key=lambda plan: plan.gpus[0].node) for key in plan.gpus]
    return Plan(last.start._replace(basis=basis), tuple(gpus))
