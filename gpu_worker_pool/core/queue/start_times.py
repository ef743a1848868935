"""When each waiter will probably start."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from math import inf

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.state import PoolState

from .owners import Order, over_quota
from .planner import MOST_GPUS, FreeAt, FreeGpu, Plan, Planner, together
from .withheld import Withheld

# The waiters for which a start is told.
MOST_WAITERS = 100


class StartTimes:
    """When each waiter will probably start: the waiters are placed in order, each where it can start soonest, for as long as it
    declared or is predicted to last. The answer is honest where it is unknown: nothing is told of a waiter behind one that
    may last for ever.

    They are worked out step by step. Between two steps the state may go on: then each step tells what it saw.
    """

    def __init__(self, state: PoolState, now: float) -> None:
        now = max(now, state.clock)
        self.starts: dict[str, FreeAt] = {}
        self._state = state
        self._withheld = Withheld(state, now)
        self._order = Order(state, now)
        self._planner = Planner(state, now, self._withheld)
        # When GPUs are free, by node, for each kind of wishes; and when those are free again that waiters so far have taken.
        self._free: dict[Wishes, dict[str, list[FreeGpu]]] = {}
        self._taken: dict[GpuKey, FreeAt] = {}
        self._gpus_left = MOST_GPUS

    def steps(self) -> Iterator[None]:
        """Go on at each step; all `starts` are known at the end."""
        for lease_id in self._order.lease_ids()[:MOST_WAITERS]:
            lease = self._state.leases.get(lease_id)
            if not isinstance(lease, QueuedLease) or lease_id in self._state.passed_over:
                continue  # it has left the queue meanwhile, or its client is not there
            plan = yield from self._plan(lease)
            if plan is not None and plan.start.at < inf:
                self._take(lease, plan)
            yield

    def _take(self, lease: QueuedLease, plan: Plan) -> None:
        self.starts[lease.id] = plan.start
        if not lease.request.wishes.is_shared:
            lasts = self._planner.duration_of(lease.request.holder.owner, lease.request.time_limit_s)
            end = FreeAt(plan.start.at + lasts.at, max(plan.start.basis, lasts.basis), lease.id)
            self._taken.update(dict.fromkeys(plan.gpus, end))

    def _plan(self, lease: QueuedLease) -> Generator[None, None, Plan | None]:
        reservation, wishes = self._state.reservation, lease.request.wishes
        if reservation is not None and reservation.lease_id == lease.id:
            return Plan(FreeAt(reservation.date, reservation.basis, reservation.after), reservation.gpus)
        request_class = self._state.queue.class_of(lease.id)
        if over_quota(self._state, request_class) is not None:
            return None
        if wishes not in self._free:
            self._free[wishes] = yield from self._free_for(wishes)
        plans = []
        for gpus in self._free[wishes].values():
            left = [(self._later(free, key), index, key) for free, index, key in gpus]
            plans.append(self._planner.soonest(left, request_class))
        return together(filter(None, plans), wishes.nodes)

    def _later(self, free: FreeAt, key: GpuKey) -> FreeAt:
        taken = self._taken.get(key)
        if taken is None:
            return free
        later = max(free, taken, key=lambda time: time.at)
        return later._replace(basis=max(free.basis, later.basis))

    def _free_for(self, wishes: Wishes) -> Generator[None, None, dict[str, list[FreeGpu]]]:
        slots: Collection[GpuSlot] = tuple(self._state.slots_on(wishes.node))
        self._gpus_left -= len(slots)
        by_node: dict[str, list[FreeGpu]] = {}
        for slot in slots if self._gpus_left >= 0 else ():
            # One that is not known any more has gone meanwhile, and its leases.
            if slot.reading is not None and self._state.slots.get(slot.key) is slot:
                free = self._planner.usable_from(slot, wishes)
                by_node.setdefault(slot.key.node, []).append((free, slot.reading.gpu.place, slot.key))
                yield
        return by_node


def expected_starts(state: PoolState, now: float) -> dict[str, FreeAt]:
    """The starts that can be told, on the pool's clock. A waiter without one is not in it."""
    times = StartTimes(state, now)
    for _ in times.steps():
        pass
    return times.starts
