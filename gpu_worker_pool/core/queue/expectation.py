"""When each waiter will probably start.

The waiters are placed in order, each where it can start soonest, for as long as it declared or is predicted to last. The
answer is honest where it is unknown: nothing is told of a waiter behind one that may last for ever.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice
from math import inf

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState

from .forecast import Forecast, FreeGpu, FreeTime, Plan, first_free, soonest, together
from .keeps import Keeps
from .order import Order
from .quotas import obstacle

# Waiters for which a start is told, GPUs whose leases are looked at for it, and GPUs that are considered for all waiters
# together: meanwhile no caller is answered.
MOST_WAITERS = 100
MOST_GPUS = 4_000
MOST_CONSIDERED = 10_000


def expected_starts(state: PoolState, now: float) -> dict[str, FreeTime]:
    """The starts that can be told, on the pool's clock. A waiter without one is not in it."""
    return _Expectation(state, max(now, state.clock)).starts()


class _Timetable:
    """When GPUs are free for one kind of wishes: those of each node in order, the first one first."""

    def __init__(self, state: PoolState, free: dict[GpuKey, FreeTime]) -> None:
        self.size = len(free)
        self.by_node: dict[str, list[FreeGpu]] = {}
        # How many of the plans that were made are in it.
        self.plans = 0
        self._free = free
        self._entries: dict[GpuKey, FreeGpu] = {}
        for key, at in free.items():
            reading = state.slots[key].reading
            if reading is not None:
                entry = self._entries[key] = (at, reading.gpu.index, key)
                self.by_node.setdefault(key.node, []).append(entry)
        for gpus in self.by_node.values():
            gpus.sort(key=first_free)

    def take(self, key: GpuKey, until: FreeTime) -> None:
        """Note that a waiter has this GPU until then."""
        entry = self._entries.get(key)
        if entry is None:
            return
        gpus, at = self.by_node[key.node], self._free[key]
        del gpus[bisect_left(gpus, first_free(entry), key=first_free)]
        later = max(at, until, key=lambda time: time.at)
        entry = self._entries[key] = (later._replace(basis=max(at.basis, later.basis)), entry[1], key)
        insort(gpus, entry, key=first_free)


class _Expectation:
    def __init__(self, state: PoolState, now: float) -> None:
        self._state = state
        self._keeps = Keeps(state, now)
        self._order = Order(state, now)
        self._forecast = Forecast(state, now)
        self._timetables: dict[Wishes, _Timetable] = {}
        # What each plan so far takes, in order.
        self._taken: list[tuple[tuple[GpuKey, ...], FreeTime]] = []
        self._gpus_left = MOST_GPUS
        self._considered_left = MOST_CONSIDERED

    def starts(self) -> dict[str, FreeTime]:
        state, starts = self._state, {}
        for lease_id in self._order.lease_ids()[:MOST_WAITERS]:
            if self._considered_left <= 0:
                break
            lease = state.queued(lease_id)
            plan = self._plan(lease)
            if plan is None or plan.start.at == inf:
                continue
            starts[lease_id] = plan.start
            if not lease.request.wishes.is_shared:
                lasts = self._forecast.duration_of(lease.request.holder.owner, lease.request.time_limit_s)
                end = FreeTime(plan.start.at + lasts.at, max(plan.start.basis, lasts.basis), lease_id)
                self._taken.append((plan.gpus, end))
        return starts

    def _plan(self, lease: QueuedLease) -> Plan | None:
        reservation = self._state.reservation
        if reservation is not None and reservation.lease_id == lease.id:
            return Plan(FreeTime(reservation.date, reservation.basis, reservation.after), reservation.gpus)
        line = self._state.queue.line_of(lease)
        if obstacle(self._state, line) is not None:
            return None
        wishes, unbooked = lease.request.wishes, self._keeps.unbooked(line)
        timetable = self._timetable_for(wishes)
        self._considered_left -= timetable.size
        # Where nothing is booked, the GPUs that are free first are the ones to take.
        most = wishes.gpus if unbooked is None else None
        plans = (soonest(gpus[:most], wishes.gpus, unbooked) for gpus in timetable.by_node.values())
        return together(filter(None, plans), wishes.nodes)

    def _timetable_for(self, wishes: Wishes) -> _Timetable:
        timetable = self._timetables.get(wishes)
        if timetable is None:
            slots = self._state.slots_for(wishes)
            self._gpus_left -= len(slots)
            seen = slots if self._gpus_left >= 0 else ()
            free = {slot.key: self._forecast.usable_from(slot, wishes) for slot in seen}
            timetable = self._timetables[wishes] = _Timetable(self._state, free)
        for gpus, until in islice(self._taken, timetable.plans, None):
            for key in gpus:
                timetable.take(key, until)
        timetable.plans = len(self._taken)
        return timetable
