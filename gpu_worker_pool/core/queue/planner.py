"""When GPUs become free, as far as that is known, and what is reserved for the first waiter.

A lease ends at its declared time limit, and its GPUs are free then: what its processes hold on to is not foreseen, so
that no request is admitted meanwhile to GPUs that wait for them. A lease without a limit is predicted to last as long as its
owner's last two leases did in the mean, twice as long once it has lasted longer, and so on. A prediction never admits a
request: nothing ends a lease that overstays it. A booked GPU is free when the booking ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Iterable, Sequence
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
from .withheld import Withheld, just_before

# The GPUs whose leases are looked at for one pass over the queue: meanwhile no caller is answered. A pass looks for one date, however many GPUs there are. Wishes that had no date
# lately are tried again in each pass while there is time for all of them and one more; else they wait for TRY_AGAIN_S.
MOST_GPUS = 4_000
# A date that rests on a prediction and is more than this away reserves nothing.
PREDICTED_AHEAD_S = 3600.0
# The time between two attempts to find a date for the same wishes while nothing happens, and before the next attempt if a
# pass had no time for it.
TRY_AGAIN_S = 60.0
TRY_NEXT_S = 5.0


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

    def may_be_free(self, key: GpuKey, request_class: RequestClass) -> bool:
        """Whether a reserved GPU may be free once its leases end, though its readings do not say so now."""
        slot = self._state.slots.get(key)
        if slot is None or slot.reading is None or not is_suitable(self._state, slot, request_class.wishes):
            return False
        ends = max((self.end_of(lease_id).at for lease_id in slot.occupants), default=self._now)
        return self._free_of_bookings(request_class, (key,), key, ends)[0] < inf

    def plan(self, request_class: RequestClass) -> Plan | None:
        """The soonest plan on any nodes; None if there is none."""
        state, wishes = self._state, request_class.wishes
        thresholds = state.settings.thresholds_for(wishes)
        best: list[Plan] = []
        for name, node in state.facts.nodes_for(wishes):
            if state.facts.could_serve(node, wishes, thresholds, in_service=True):
                is_full = len(best) == wishes.nodes
                plan = self._plan_on(name, request_class, (), best[-1].start.at if is_full else inf)
                if plan is not None:
                    insort(best, plan, key=_sooner)
                    del best[wishes.nodes :]
        return together(best, wishes.nodes)

    def plan_on_all(
        self, nodes: Iterable[str], request_class: RequestClass, reserved: Container[GpuKey]
    ) -> Plan | None:
        """The soonest plan on these nodes, where these GPUs are reserved already; None if there is none on one of them."""
        plans = [self._plan_on(node, request_class, reserved) for node in sorted(nodes)]
        return together(filter(None, plans), request_class.wishes.nodes)

    def _plan_on(
        self, node: str, request_class: RequestClass, reserved: Container[GpuKey], until: float = inf
    ) -> Plan | None:
        """The GPUs of a node that can serve its part of these wishes soonest; None if nothing tells when, or later than
        `until`.
        """
        slots, wishes = self._state.slots_on(node), request_class.wishes
        to_spare = len(slots) - wishes.gpus
        found: list[FreeGpu] = []
        for slot in slots:
            free = NEVER if slot.reading is None else self.usable_from(slot, wishes)
            if slot.reading is not None and free.at < inf and free.at <= until:
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
                if booking.ends_at is None:
                    return inf, passed
                at = booking.ends_at - self._state.wall_offset_s
            elif booking.starts_at - self._state.wall_offset_s > at and not _is_own(booking, request_class):
                break  # a lease ends before it and all later ones
            passed += 1
        return at, passed

    def _may_be_late(self, request_class: RequestClass, key: GpuKey, at: float) -> bool:
        """Whether leases of an owner that has booked the GPU before may last for longer than the booking."""
        return any(
            booking.owner not in {None, request_class.owner} and booking.starts_at - self._state.wall_offset_s < at
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


class Reserving:
    """Finds the one reservation of a pass over the queue: the plan of the first waiter that cannot be served and has waited
    for `reserve_after_s`.

    It is on the node where the waiter can start soonest, or on the nodes of a gang, and keeps to these nodes: chosen again in
    every pass, the date would slip for ever. On each node, the GPUs that are free first are reserved, so a lease that ends
    early brings the date forward. While readings do not tell (one is late, or shows the load of a process that has gone), the
    GPUs stay reserved for as long as a GPU may drain.
    """

    def __init__(
        self, state: PoolState, now: float, planner: Planner, withheld: Withheld, newcomer: QueuedLease | None = None
    ) -> None:
        self._state = state
        self._now = now
        self._planner = planner
        self._withheld = withheld
        self._gpus_left = MOST_GPUS
        self._tried: set[Wishes | RequestClass] = set()
        self.no_date_until = {wishes: at for wishes, at in state.no_date_until.items() if at > now}
        self._tried_lately = frozenset(self.no_date_until)
        self._due_after_s = state.settings.reserve_after_s - state.wall_offset_s
        self._look_again_at = min(self.no_date_until.values(), default=inf)
        # A newcomer asks after all others.
        first_asked_at = state.queue.first_asked_at if len(state.queue) else newcomer.requested_at if newcomer else inf
        first_due = first_asked_at + self._due_after_s
        self.is_any_due = first_due <= now
        if not self.is_any_due:
            self._look_again(first_due)

    def is_due(self, lease: QueuedLease) -> bool:
        """Whether a waiter that cannot be served has waited so long that GPUs may be reserved for it."""
        due_at = lease.requested_at + self._due_after_s
        if due_at > self._now:
            self._look_again(due_at)
        return due_at <= self._now

    @property
    def changes_at(self) -> float:
        """Until when nothing changes, unless something happens."""
        return just_before(self._look_again_at)

    def will_look(self, request_class: RequestClass) -> bool:
        """Whether a date is looked for in this pass, for a waiter of this class without a reservation."""
        state, wishes = self._state, request_class.wishes
        if self._kind(request_class) in self._tried or all(slot.reading is None for slot in state.slots.values()):
            return False
        number = len(state.slots_on(wishes.node))
        if wishes in self._tried_lately and number * (len(self._tried_lately) + 1) > MOST_GPUS:
            return False
        return self._gpus_left == MOST_GPUS or number <= self._gpus_left

    def reserve(self, lease: QueuedLease, request_class: RequestClass) -> Reservation | None:
        """The reservation of a waiter that cannot be served and is due; None if there is none for it."""
        state, wishes, current = self._state, request_class.wishes, self._state.reservation
        if current is not None and current.lease_id == lease.id and current.nodes <= state.facts.nodes.keys():
            plan = self._planner.plan_on_all(current.nodes, request_class, current.gpus)
            if plan is not None:
                return self._reservation(lease, plan)
            given_up = current.seen + state.settings.drain_limit_s
            may_be_free = (self._planner.may_be_free(key, request_class) for key in current.gpus)
            if self._now < given_up and all(may_be_free):
                self._look_again(given_up)
                return current
        if not self.will_look(request_class):
            if self._kind(request_class) not in self._tried:
                self._look_again(self._now + TRY_NEXT_S)
            return None
        self._tried.add(self._kind(request_class))
        self._gpus_left -= len(state.slots_on(wishes.node))
        plan = self._planner.plan(request_class)
        if plan is None or (plan.start.basis is Basis.PREDICTED and plan.start.at > self._now + PREDICTED_AHEAD_S):
            self.no_date_until[wishes] = self._now + TRY_AGAIN_S
            self._look_again(self.no_date_until[wishes])
            return None
        return self._reservation(lease, plan)

    def _kind(self, request_class: RequestClass) -> Wishes | RequestClass:
        """What the soonest plan depends on."""
        return request_class if self._withheld.has_bookings else request_class.wishes

    def _reservation(self, lease: QueuedLease, plan: Plan) -> Reservation:
        if plan.start.at > self._now:
            self._look_again(plan.start.at)  # a prediction is then overrun
        return Reservation(lease.id, plan.gpus, plan.start.at, plan.start.basis, plan.start.after, self._now)

    def _look_again(self, at: float) -> None:
        self._look_again_at = min(self._look_again_at, at)
