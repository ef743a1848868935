"""When each waiter will probably start.

The waiters are placed in order, each where it can start soonest, for as long as it declared or is predicted to last. The
answer is honest where it is unknown: nothing is told of a waiter behind one that may last for ever.
"""

from __future__ import annotations

from math import inf

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState

from .forecast import Forecast, FreeTime, Plan, soonest, together
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


class _Expectation:
    def __init__(self, state: PoolState, now: float) -> None:
        self._state = state
        self._keeps = Keeps(state, now)
        self._order = Order(state, now)
        self._forecast = Forecast(state, now)
        self._free: dict[Wishes, dict[GpuKey, FreeTime]] = {}
        self._taken_until: dict[GpuKey, FreeTime] = {}
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
                self._taken_until.update(dict.fromkeys(plan.gpus, end))
        return starts

    def _plan(self, lease: QueuedLease) -> Plan | None:
        reservation = self._state.reservation
        if reservation is not None and reservation.lease_id == lease.id:
            return Plan(FreeTime(reservation.date, reservation.basis, reservation.after), reservation.gpus)
        line = self._state.queue.line_of(lease)
        if obstacle(self._state, line) is not None:
            return None
        free, unbooked = self._free_for(lease.request.wishes), self._keeps.unbooked(line)
        self._considered_left -= len(free)
        by_node: dict[str, list[tuple[FreeTime, int, GpuKey]]] = {}
        for key, at in free.items():
            reading = self._state.slots[key].reading
            if reading is not None:
                later = max(at, self._taken_until.get(key, at), key=lambda time: time.at)
                later = later._replace(basis=max(at.basis, later.basis))
                by_node.setdefault(key.node, []).append((later, reading.gpu.index, key))
        wishes = lease.request.wishes
        plans = (soonest(gpus, wishes.gpus, unbooked) for gpus in by_node.values())
        return together(filter(None, plans), wishes.nodes)

    def _free_for(self, wishes: Wishes) -> dict[GpuKey, FreeTime]:
        if wishes not in self._free:
            slots = self._state.slots_for(wishes)
            self._gpus_left -= len(slots)
            seen = slots if self._gpus_left >= 0 else ()
            self._free[wishes] = {slot.key: self._forecast.usable_from(slot, wishes) for slot in seen}
        return self._free[wishes]
