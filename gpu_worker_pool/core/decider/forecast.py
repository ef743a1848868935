"""When each waiter will probably start, and when a request would that nobody has made yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Final

from gpu_worker_pool.core.model.events import RefusalCode
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.model.waiting import RequestClass
from gpu_worker_pool.core.queue.owners import Order, over_quota
from gpu_worker_pool.core.queue.planner import MOST_GPUS, FreeAt, FreeGpu, Plan, Planner, together
from gpu_worker_pool.core.queue.serve import serve_queue
from gpu_worker_pool.core.queue.withheld import Withheld

from .decide import preempted, why_refused

# The waiters for which a start is told.
MOST_WAITERS = 100
SIZES: Final = (1, 2, 4, 8)
# The models that are told apart: those of which the pool has most GPUs.
MOST_MODELS: Final = 8
# The id of the request that is not made. No client has it.
NEW: Final = ""


class StartTimes:
    """When each waiter will probably start: the waiters are placed in order, each where it can start soonest, for as long as it
    declared or is predicted to last. The answer is honest where it is unknown: nothing is told of a waiter behind one that
    may last for ever.

    They are worked out step by step. Between two steps the state may go on: then each step tells what it saw.
    """

    def __init__(self, state: PoolState, now: float) -> None:
        now = max(now, state.clock)
        self.starts: dict[str, FreeAt] = {}
        self.withheld = Withheld(state, now)
        # What is kept for waiters.
        self.reservation, self.claims = state.reservation, state.claims
        # Whether a start is told for the next waiter, too.
        self.is_told_behind = True
        self._state = state
        self._order = Order(state, now)
        self._planner = Planner(state, now, self.withheld)
        # When GPUs are free, by node, for each kind of wishes; and when those are free again that waiters so far have taken.
        self._free: dict[Wishes, dict[str, list[FreeGpu]]] = {}
        self._taken: dict[GpuKey, FreeAt] = {}
        self._gpus_left = MOST_GPUS

    def steps(self, newcomer: QueuedLease | None = None) -> Iterator[None]:
        """Go on at each step; all `starts` are known at the end. With a newcomer, those of the waiters ahead of it."""
        lease_ids = self._order.lease_ids(newcomer=newcomer)
        if newcomer is not None:
            del lease_ids[lease_ids.index(newcomer.id) :]
        self.is_told_behind = len(lease_ids) < MOST_WAITERS
        for lease_id in lease_ids[:MOST_WAITERS]:
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
        if (kept := self._planner.kept_for(lease, self.reservation, self.claims)) is not None:
            return kept
        return (yield from self.plan_behind(self._state.queue.class_of[lease.id]))

    def plan_behind(self, request_class: RequestClass) -> Generator[None, None, Plan | None]:
        """The plan of a request behind the waiters so far, for which nothing is kept yet."""
        if over_quota(self._state, request_class) is not None:
            return None
        wishes = request_class.wishes
        # When one GPU is free does not depend on how many are wished for.
        of_each = replace(wishes, gpus=1, nodes=1)
        if of_each not in self._free:
            self._free[of_each] = yield from self._free_for(of_each)
        plans, kept = [], self.withheld.first_right_from(request_class)
        for gpus in self._free[of_each].values():
            left = [(self._later(free, key), index, key) for free, index, key in gpus if key not in kept]
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


class When(StrEnum):
    """`now`: it is granted at once. `later`: it waits, and a start can be told. `unknown`: it waits, and nothing tells for how
    long. `never`: it is refused.
    """

    NOW = "now"
    LATER = "later"
    UNKNOWN = "unknown"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Forecast:
    """What becomes of a request with these wishes.

    `start` is there for `later`: a time on the pool's clock, and whether it rests on declared limits or on predictions. `why`
    gives the words of a refusal.
    """

    wishes: Wishes
    when: When
    start: FreeAt | None = None
    why: str | None = None


class Forecasts:
    """The forecasts of requests of this owner that say nothing but their wishes: each as if none of the others were made.

    They are worked out step by step, as the starts of the waiters are (see StartTimes).
    """

    def __init__(self, state: PoolState, now: float, wishes: Iterable[Wishes], owner: str | None = None) -> None:
        self.found: list[Forecast] = []
        self._state = state
        self._now = max(now, state.clock)
        self._wishes = wishes
        self._owner = owner
        self._times = StartTimes(state, now)

    def steps(self) -> Iterator[None]:
        """Go on at each step; all are `found` at the end, in the order of the wishes."""
        # The pass over the queue that a request brings about would tell again what is kept for those ahead.
        found = serve_queue(self._state, self._now)
        if found.settled_until is not None:
            self._times.reservation, self._times.claims = found.reservation, found.claims
        yield from self._times.steps(self._newcomer(Wishes()))  # each of them would have this queue position
        for wishes in self._wishes:
            self.found.append((yield from self._of(wishes)))
            yield

    def _newcomer(self, wishes: Wishes) -> QueuedLease:
        request = Request(wishes, Holder(owner=self._owner))
        return QueuedLease(NEW, request, self._state.next_seq, self._now + self._state.wall_offset_s)

    def _of(self, wishes: Wishes) -> Generator[None, None, Forecast]:
        state, newcomer = self._state, self._newcomer(wishes)
        if (refused := why_refused(state, newcomer.request)) is not None:
            code, why = refused
            return Forecast(wishes, When.NEVER if code is RefusalCode.UNSERVABLE else When.UNKNOWN, why=why)
        found = serve_queue(state, self._now, newcomer=newcomer)
        if found.grant is not None and found.grant.lease_id == NEW:
            return Forecast(wishes, When.NOW)
        planner = Planner(state, self._now, self._times.withheld)
        for victim in found.victims:
            planner.expect_end(victim, preempted(state, victim, self._now).ends)
        plan = planner.kept_for(newcomer, found.reservation, found.claims)
        if plan is None and self._times.is_told_behind:
            plan = yield from self._times.plan_behind(state.queue.class_for(newcomer.request))
        if plan is None or plan.start.at == inf:
            return Forecast(wishes, When.UNKNOWN)
        return Forecast(wishes, When.LATER, plan.start)


def usual_wishes(state: PoolState, sizes: Sequence[int] = SIZES) -> list[Wishes]:
    """What most ask for: whole GPUs of one node, of any model, and of each where there are several."""
    nodes = state.facts.nodes.values()
    names = Counter(facts.name for node in nodes for facts in node.gpus.values() if facts.name and facts.is_ours)
    models = sorted(name for name, _ in names.most_common(MOST_MODELS)) if len(names) > 1 else []
    return [Wishes(gpus=gpus, model=model) for model in (None, *models) for gpus in sizes]
