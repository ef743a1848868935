"""The queue's rule as plainly as possible: for each waiter, all GPUs are judged, and the rule of placement.py chooses.

Nothing is remembered from one waiter to the next, nothing is summed up for a node, and waiters have no classes. The tests hold
the core against it (see queue/test_same_decisions.py).
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace
from operator import attrgetter

from gpu_worker_pool.core.model.facts import SlotFacts, facts_of
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import memory_use
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import as_left_to, is_suitable, judge
from gpu_worker_pool.core.queue.owners import Order, over_quota
from gpu_worker_pool.core.queue.placement import Grant, Placer
from gpu_worker_pool.core.queue.planner import Planner
from gpu_worker_pool.core.queue.preemption import find_claim, spared
from gpu_worker_pool.core.queue.reserving import Reserving
from gpu_worker_pool.core.queue.serve import QueuePass
from gpu_worker_pool.core.queue.withheld import Withheld

Gpus = tuple[GpuKey, ...]
# A position, an index and a key.
Place = tuple[float, float, GpuKey]


class PlainPlacer:
    """Judges every GPU of the pool for every request."""

    def __init__(self, state: PoolState, now: float) -> None:
        self._state = state
        self._now = now
        known = (state.settings, state.excluded, state.ignored_processes)
        self._facts = {key: facts_of(slot, *known) for key, slot in state.slots.items()}

    def place(self, wishes: Wishes, avoiding: AbstractSet[GpuKey]) -> Gpus | None:
        """The GPUs to grant; None if there are not enough."""
        scores: dict[GpuKey, float] = {}
        for slot in self._state.slots.values():
            verdict = judge(self._state, slot, wishes, self._now)
            if verdict.is_eligible and slot.key not in avoiding:
                scores[slot.key] = verdict.facts["score"]
        by_node: dict[str, list[GpuKey]] = {}
        for key in scores:
            by_node.setdefault(key.node, []).append(key)
        choose = self._best_gpu if wishes.gpus == 1 else self._best_gpus
        parts = [choose(usable, scores, wishes) for usable in by_node.values() if len(usable) >= wishes.gpus]
        if len(parts) < wishes.nodes:
            return None
        chosen = sorted(parts)[: wishes.nodes]
        return tuple(key for _, gpus in sorted(chosen, key=lambda part: part[1][0].node) for key in gpus)

    def _best_gpu(
        self, usable: list[GpuKey], scores: dict[GpuKey, float], wishes: Wishes
    ) -> tuple[tuple[object, ...], Gpus]:
        def rank(key: GpuKey) -> tuple[object, ...]:
            facts, slot = self._facts[key], self._state.slots[key]
            fewest = sum(bool(each.is_open_to_exclusive) for each in self._on(key.node))
            if wishes.memory_mb is None:
                return (scores[key], fewest, key.node, facts.gpu_index, key)
            is_whole = not slot.occupants
            return (is_whole, self._left_mb(key, wishes), fewest if is_whole else 0, key.node, facts.gpu_index, key)

        best = min(usable, key=rank)
        return rank(best), (best,)

    def _best_gpus(
        self, usable: list[GpuKey], scores: dict[GpuKey, float], wishes: Wishes
    ) -> tuple[tuple[object, ...], Gpus]:
        ranks = {key: self._facts[key].room_mb if wishes.is_shared else scores[key] for key in usable}
        by_model: dict[str | None, list[GpuKey]] = {}
        for key in usable:
            by_model.setdefault(self._facts[key].name, []).append(key)
        enough = [alike for alike in by_model.values() if len(alike) >= wishes.gpus]
        fewest = min(map(len, enough), default=0)
        groups = [alike for alike in enough if len(alike) == fewest] or [usable]
        choices = [choice for alike in groups for choice in self._choices(alike, ranks, wishes)]
        _, row = min(choices)
        is_open = attrgetter("is_open_to_shared" if wishes.is_shared else "is_open_to_exclusive")
        node, gpus = usable[0].node, sorted((index, key) for _, index, key in row)
        return (sum(bool(is_open(facts)) for facts in self._on(node)), node), tuple(key for _, key in gpus)

    def _choices(
        self, usable: list[GpuKey], ranks: dict[GpuKey, float], wishes: Wishes
    ) -> list[tuple[tuple[object, ...], list[Place]]]:
        """The GPUs that come into question, with what they are chosen by: for shares those with the least room; else any in a
        row, of the idle ones if these are enough.
        """
        number = wishes.gpus
        if wishes.is_shared:
            fullest = sorted(usable, key=lambda key: (ranks[key], self._place(key)))[:number]
            return [((sum(ranks[key] for key in fullest),), sorted(map(self._place, fullest)))]
        idle = [key for key in usable if ranks[key] < 10]
        row = sorted(map(self._place, idle if len(idle) >= number else usable))
        choices: list[tuple[tuple[object, ...], list[Place]]] = []
        for first in range(len(row) - number + 1):
            last = first + number - 1
            step = max(row[place + 1][0] - row[place][0] for place in range(first, last))
            start, end = first, last  # of all GPUs that are reached with steps that are no larger
            while start > 0 and row[start][0] - row[start - 1][0] <= step:
                start -= 1
            while end < len(row) - 1 and row[end + 1][0] - row[end][0] <= step:
                end += 1
            span, is_inside, chosen = row[last][0] - row[first][0], start < first and last < end, row[first : last + 1]
            choices.append(((step, end - start, span, is_inside, sum(ranks[key] for *_, key in chosen)), chosen))
        return choices

    def _place(self, key: GpuKey) -> Place:
        return (self._facts[key].position, self._facts[key].gpu_index, key)

    def _on(self, node: str) -> list[SlotFacts]:
        return [facts for key, facts in self._facts.items() if key.node == node]

    def _left_mb(self, key: GpuKey, wishes: Wishes) -> float:
        """The memory that a share leaves of what may be granted."""
        slot, facts = self._state.slots[key], self._facts[key]
        use = memory_use(slot, self._state.ignored_processes)
        assert use is not None
        assert facts.total_mb is not None
        part = self._state.settings.thresholds_for(wishes).memory_percent / 100
        return part * facts.total_mb - (wishes.memory_mb or 0.0) - use.committed_mb

    def _use(self, key: GpuKey, wishes: Wishes) -> float:
        facts = self._facts[key]
        return facts.room_mb if wishes.is_shared else (facts.percent or 0.0) + facts.load_percent

    def with_home(self, gpus: Gpus, lease: QueuedLease, avoiding: AbstractSet[GpuKey]) -> Gpus:
        wishes, home = lease.request.wishes, lease.request.holder.node
        if wishes.nodes == 1 or home is None or any(key.node == home for key in gpus):
            return gpus
        own = self.place(replace(wishes, nodes=1, node=home), avoiding)
        there = {key for key in self._facts if key.node == home}
        others = self.place(replace(wishes, nodes=wishes.nodes - 1), avoiding | there)
        return gpus if own is None or others is None else tuple(sorted((*own, *others), key=lambda key: key.node))

    def left_to(self, lease: QueuedLease, ahead: list[QueuedLease], avoiding: AbstractSet[GpuKey]) -> GpuKey | None:
        """A GPU that only the waiter's own process uses, if no waiter ahead needs such a GPU."""
        state, process = self._state, lease.request.holder.process
        for key in sorted(self._facts.keys() - avoiding, key=lambda key: (self._use(key, lease.request.wishes), key)):
            if process is None or process not in self._facts[key].left_to:
                continue
            slot = as_left_to(state, state.slots[key], lease.request)
            if slot is None or not judge(state, slot, lease.request.wishes, self._now).is_eligible:
                continue
            if not any(is_suitable(state, slot, other.request.wishes) for other in ahead):
                return key
        return None


def plain_pass(state: PoolState, now: float) -> QueuePass:
    """A pass over the queue in which everything is tried for each waiter."""
    placer, withheld = PlainPlacer(state, now), Withheld(state, now)
    reserving = Reserving(state, now, Planner(state, now, withheld), withheld)
    found, gone = QueuePass(), set[GpuKey]()
    ahead: list[QueuedLease] = []
    for lease_id in Order(state, now).lease_ids():
        if lease_id in state.passed_over:
            continue
        lease, request_class = state.queued(lease_id), state.queue.class_of[lease_id]
        wishes, kept = lease.request.wishes, gone | withheld.kept_from(request_class)
        if over_quota(state, request_class) is not None:
            ahead.append(lease)
            continue
        gpus = placer.place(wishes, kept)
        if gpus is not None:
            gpus = placer.with_home(gpus, lease, kept)
            found.grant = Grant(lease_id, gpus)
            return found
        own = placer.left_to(lease, ahead, kept)
        if own is not None:
            found.grant = Grant(lease_id, (own,))
            return found
        claimed = None if lease.request.preemptible else find_claim(Placer(state, now), wishes, kept)
        if claimed is not None and state.preemptible:
            found.victims = claimed.victims
            found.claims.update(dict.fromkeys(claimed.gpus, lease_id))
            gone.update(claimed.gpus)
            if claimed.victims:
                return found
            continue
        ahead.append(lease)
        if withheld.reservation is None and reserving.is_due(lease):
            found.reservation = withheld.reservation = reserving.reserve(lease, request_class)
    awaited = {*found.claims, *(found.reservation.gpus if found.reservation else ())}
    found.spared = spared(state, awaited, now)
    found.settled_until = None if found.spared else now
    return found
