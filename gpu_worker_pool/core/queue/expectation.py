"""When each waiter will probably start.

The waiters are placed in order, each where it can start soonest, for as long as it declared or is predicted to last. The
answer is honest where it is unknown: nothing is told of a waiter behind one that may last for ever.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from math import inf

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot
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
    expectation = Expectation(state, now)
    for _ in expectation.steps():
        pass
    return expectation.starts


class _Timetable:
    """When GPUs are free for one kind of wishes: those of each node in order, the first one first."""

    def __init__(self, free: Sequence[tuple[GpuSlot, FreeTime]]) -> None:
        self.size = len(free)
        self.by_node: dict[str, list[FreeGpu]] = {}
        # How many of the plans that were made are in it.
        self.plans = 0
        self._free = {slot.key: at for slot, at in free}
        self._entries: dict[GpuKey, FreeGpu] = {}
        for slot, at in free:
            if slot.reading is not None:
                entry = self._entries[slot.key] = (at, slot.reading.gpu.index, slot.key)
                self.by_node.setdefault(slot.key.node, []).append(entry)
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


class Expectation:
    """Works the starts out step by step. Between two steps the state may go on: then each step tells what it saw."""

    def __init__(self, state: PoolState, now: float) -> None:
        now = max(now, state.clock)
        self.starts: dict[str, FreeTime] = {}
        self._state = state
        self._keeps = Keeps(state, now)
        self._order = Order(state, now)
        self._forecast = Forecast(state, now)
        self._timetables: dict[Wishes, _Timetable] = {}
        # What each plan so far takes, in order.
        self._taken: list[tuple[tuple[GpuKey, ...], FreeTime]] = []
        self._gpus_left = MOST_GPUS
        self._considered_left = MOST_CONSIDERED

    def steps(self) -> Iterator[None]:
        """Go on at each step; all `starts` are known at the end."""
        for lease_id in self._order.lease_ids()[:MOST_WAITERS]:
            if self._considered_left <= 0:
                return
            lease = self._state.leases.get(lease_id)
            if not isinstance(lease, QueuedLease):
                continue  # it has left the queue meanwhile
            plan = yield from self._plan(lease)
            if plan is not None and plan.start.at < inf:
                self._note(lease, plan)
            yield

    def _note(self, lease: QueuedLease, plan: Plan) -> None:
        self.starts[lease.id] = plan.start
        if not lease.request.wishes.is_shared:
            lasts = self._forecast.duration_of(lease.request.holder.owner, lease.request.time_limit_s)
            end = FreeTime(plan.start.at + lasts.at, max(plan.start.basis, lasts.basis), lease.id)
            self._taken.append((plan.gpus, end))

    def _plan(self, lease: QueuedLease) -> Generator[None, None, Plan | None]:
        reservation = self._state.reservation
        if reservation is not None and reservation.lease_id == lease.id:
            return Plan(FreeTime(reservation.date, reservation.basis, reservation.after), reservation.gpus)
        line = self._state.queue.line_of(lease)
        if obstacle(self._state, line) is not None:
            return None
        wishes, unbooked = lease.request.wishes, self._keeps.unbooked(line)
        timetable = yield from self._timetable_for(wishes)
        self._considered_left -= timetable.size
        # Where nothing is booked, the GPUs that are free first are the ones to take.
        most = wishes.gpus if unbooked is None else None
        plans = (soonest(gpus[:most], wishes.gpus, unbooked) for gpus in timetable.by_node.values())
        return together(filter(None, plans), wishes.nodes)

    def _timetable_for(self, wishes: Wishes) -> Generator[None, None, _Timetable]:
        timetable = self._timetables.get(wishes)
        if timetable is None:
            slots = tuple(self._state.slots_for(wishes))
            self._gpus_left -= len(slots)
            free: list[tuple[GpuSlot, FreeTime]] = []
            for slot in slots if self._gpus_left >= 0 else ():
                if self._state.slots.get(slot.key) is slot:  # else it has gone meanwhile, and its leases
                    free.append((slot, self._forecast.usable_from(slot, wishes)))
                    yield
            timetable = self._timetables[wishes] = _Timetable(free)
        for gpus, until in islice(self._taken, timetable.plans, None):
            for key in gpus:
                timetable.take(key, until)
        timetable.plans = len(self._taken)
        return timetable
