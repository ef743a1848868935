"""When GPUs become free, as far as that is known.

A lease ends at its declared time limit, and its GPUs are free then: what its processes hold on to is not foreseen, so
that no request is admitted meanwhile to GPUs that wait for them. A lease without a limit is predicted to last as long as its owner's last two leases
did in the mean, twice as long once it has lasted longer, and so on. A prediction never admits a request: nothing ends a
lease that overstays it. A booked GPU is free when the booking ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from heapq import nsmallest
from math import inf
from typing import NamedTuple

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease
from gpu_worker_pool.core.model.outsiders import outside_use
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.reservation import Basis
from gpu_worker_pool.core.model.slot import GpuSlot, Occupants, memory_use
from gpu_worker_pool.core.model.state import PoolState

from .eligibility import has_opening, is_suitable, judge, stale_at
from .quotas import time_limit_of
from .verdicts import Eligible


class FreeTime(NamedTuple):
    """A time on the pool's clock. It is infinite, and its basis unknown, if nothing tells. `after` is the lease whose end
    it is.
    """

    at: float
    basis: Basis
    after: str | None = None


NEVER = FreeTime(inf, Basis.UNKNOWN)
# When a GPU that is free at a time is free of bookings as well; None if there are no bookings.
Unbooked = Callable[[GpuKey, FreeTime], FreeTime] | None
# When a GPU is free, its index and its key.
FreeGpu = tuple[FreeTime, int, GpuKey]


class Plan(NamedTuple):
    """The GPUs that are free first, of each node as many as are wished for, and when the last of them is."""

    start: FreeTime
    gpus: tuple[GpuKey, ...]


class Forecast:
    """What can be told at one instant."""

    def __init__(self, state: PoolState, now: float) -> None:
        self._state = state
        self._now = now
        self._ends: dict[str, FreeTime] = {}

    def duration_of(self, owner: str | None, declared_s: float | None) -> FreeTime:
        """How long a lease of this owner lasts."""
        limit_s = time_limit_of(self._state, owner, declared_s)
        return self._predicted(owner) if limit_s is None else FreeTime(limit_s, Basis.DECLARED)

    def _predicted(self, owner: str | None) -> FreeTime:
        use = self._state.owners.get(owner)
        recent = use.recent if use and use.recent else self._state.recent
        return FreeTime(max(sum(recent) / len(recent), 1.0), Basis.PREDICTED) if recent else NEVER

    def end_of(self, lease_id: str) -> FreeTime:
        if lease_id not in self._ends:
            self._ends[lease_id] = self._end_of(lease_id)
        return self._ends[lease_id]

    def _end_of(self, lease_id: str) -> FreeTime:
        state, lease = self._state, self._state.leases[lease_id]
        if isinstance(lease, DrainingLease):
            return FreeTime(self._now, Basis.DECLARED, lease_id)
        assert isinstance(lease, ActiveLease), lease  # noqa: S101 - a broken invariant must not go on
        if (ends := lease.ends) is not None:
            return FreeTime(max(ends, self._now), Basis.DECLARED, lease_id)
        # Its owner may have a limit since the grant, which does not bind it.
        lasts_s, basis, _ = self._predicted(lease.request.holder.owner)
        if basis is Basis.UNKNOWN:
            return NEVER
        lasted_s = max(self._now + state.wall_offset_s - lease.granted_at, 0.0)
        while lasts_s <= lasted_s:
            lasts_s *= 2
        return FreeTime(self._now - lasted_s + lasts_s, Basis.PREDICTED, lease_id)

    def usable_from(self, slot: GpuSlot, wishes: Wishes) -> FreeTime:
        """When the leases on a GPU will have left enough of it for these wishes."""
        # To judge a GPU takes far longer than to see that its leases admit no other.
        if has_opening(self._state, slot, wishes) and isinstance(judge(self._state, slot, wishes, self._now), Eligible):
            return FreeTime(self._now, Basis.DECLARED)
        if not slot.occupants:
            return NEVER  # what keeps it ends at no known time
        left = dict(slot.occupants)
        basis = Basis.DECLARED
        for end, lease_id in sorted((self.end_of(lease_id), lease_id) for lease_id in slot.occupants):
            if end.at == inf:
                return NEVER
            basis = max(basis, end.basis)
            del left[lease_id]
            if would_do(self._state, slot, wishes, Occupants(left), self._now):
                return FreeTime(end.at, basis, lease_id)
        return NEVER

    def may_be_free(self, key: GpuKey, wishes: Wishes, unbooked: Unbooked) -> bool:
        """Whether a GPU may be free for these wishes once its leases end, though its readings do not say so now."""
        slot = self._state.slots.get(key)
        if slot is None or slot.reading is None or not is_suitable(self._state, slot, wishes):
            return False
        ends = FreeTime(
            max((self.end_of(lease_id).at for lease_id in slot.occupants), default=self._now), Basis.DECLARED
        )
        return (unbooked(key, ends) if unbooked else ends).at < inf

    def plan_on(self, node: str, wishes: Wishes, unbooked: Unbooked = None, until: float = inf) -> Plan | None:
        """The GPUs of a node that can serve its part of these wishes soonest; None if nothing tells when, or later than
        `until`.
        """
        slots = [self._state.slots[key] for key in self._state.capacity.gpus_of(node)]
        to_spare = len(slots) - wishes.gpus
        found = []
        for slot in slots:
            free = NEVER if slot.reading is None else self.usable_from(slot, wishes)
            if slot.reading is not None and free.at < inf and free.at <= until:
                found.append((free, slot.reading.gpu.index, slot.key))
            elif to_spare <= 0:
                return None  # the others are not enough
            else:
                to_spare -= 1
        return soonest(found, wishes.gpus, unbooked)

    def plan(self, wishes: Wishes, unbooked: Unbooked = None) -> Plan | None:
        """The soonest plan on any nodes; None if there is none."""
        thresholds = self._state.settings.thresholds_for(wishes)
        capacity = self._state.capacity
        best: list[Plan] = []
        for node in capacity.nodes_for(wishes):
            if capacity.could_serve_on(node, wishes, thresholds):
                is_full = len(best) == wishes.nodes
                plan = self.plan_on(node, wishes, unbooked, best[-1].start.at if is_full else inf)
                if plan is not None:
                    insort(best, plan, key=_sooner)
                    del best[wishes.nodes :]
        return together(best, wishes.nodes)

    def plan_on_all(self, nodes: Iterable[str], wishes: Wishes, unbooked: Unbooked) -> Plan | None:
        """The soonest plan on these nodes; None if there is none on one of them."""
        plans = [self.plan_on(node, wishes, unbooked) for node in sorted(nodes)]
        return together(filter(None, plans), wishes.nodes)


def soonest(gpus: Iterable[FreeGpu], number: int, unbooked: Unbooked = None) -> Plan | None:
    """The first so many of these GPUs, by when each is free; None if there are not so many."""
    known = sorted((entry for entry in gpus if entry[0].at < inf), key=first_free)
    chosen = known[:number] if unbooked is None else _unbooked_together(known, number, unbooked)
    if len(chosen) < number:
        return None
    basis = max(free.basis for free, _, _ in chosen)
    last = chosen[-1][0]
    return Plan(FreeTime(last.at, basis, last.after), tuple(key for _, _, key in sorted(chosen, key=lambda it: it[1])))


def _unbooked_together(
    known: list[FreeGpu], number: int, unbooked: Callable[[GpuKey, FreeTime], FreeTime]
) -> list[FreeGpu]:
    """The first so many that are free of bookings at the same time, in the order in which they are free."""
    start, times = -inf, [free for free, _, _ in known]
    while True:
        times = [
            unbooked(key, time if time.at >= start else time._replace(at=start))
            for time, (_, _, key) in zip(times, known, strict=True)
        ]
        soonest_times = sorted(time.at for time in times)[:number]
        if len(soonest_times) < number or soonest_times[-1] == inf:
            return []
        if soonest_times[-1] <= start:
            together_free = [pair for pair in zip(times, known, strict=True) if pair[0].at <= start][:number]
            found = [
                (time._replace(after=free.after if free.at == start else None), index, key)
                for time, (free, index, key) in together_free
            ]
            return sorted(found, key=lambda entry: entry[0].after is not None)
        start = soonest_times[-1]


def first_free(entry: FreeGpu) -> tuple[float, int, GpuKey]:
    return (entry[0].at, *entry[1:])


def _sooner(plan: Plan) -> tuple[float, tuple[GpuKey, ...]]:
    return (plan.start.at, plan.gpus)


def together(plans: Iterable[Plan], number: int) -> Plan | None:
    """The soonest so many of these plans, each for a node of its own; None if there are not so many."""
    chosen = nsmallest(number, plans, key=_sooner)
    if len(chosen) < number:
        return None
    last = chosen[-1]
    if number == 1:
        return last
    basis = max(plan.start.basis for plan in chosen)
    gpus = [key for plan in sorted(chosen, key=lambda plan: plan.gpus[0].node) for key in plan.gpus]
    return Plan(last.start._replace(basis=basis), tuple(gpus))


def would_do(state: PoolState, slot: GpuSlot, wishes: Wishes, left: Occupants, now: float) -> bool:
    """Whether a GPU would do if of its leases only these were left. The load is taken for that of the others."""
    reading, settings = slot.reading, state.settings
    if reading is None or reading.fault is not None or now > stale_at(state, reading):
        return False
    if not is_suitable(state, slot, wishes) or not GpuSlot(slot.key, reading, left).is_open_for(
        shared=wishes.is_shared, workers_per_gpu=settings.workers_per_gpu, max_sharers=settings.max_sharers
    ):
        return False
    use = memory_use(slot, state.ignored_processes)
    if use is None or reading.memory_total_mb is None or reading.utilization_percent is None:
        return False
    limit_mb = settings.thresholds_for(wishes).memory_percent * reading.memory_total_mb / 100
    if wishes.memory_mb is not None:
        return sum(use.by_lease[lease_id] for lease_id in left) + use.outside_mb + wishes.memory_mb <= limit_mb
    if settings.avoids_outsiders(wishes) and outside_use(slot, settings, state.ignored_processes) is not None:
        return False
    return sum(use.by_lease[lease_id] for lease_id in left) + use.outside_mb < limit_mb
