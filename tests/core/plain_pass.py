"""Placing and serving as plainly as possible: all GPUs are sorted for each request, and each waiter is tried in each pass.

The tests hold the core against it (see queue/test_same_decisions.py). It is the way in which the core once did it: each GPU carries the
number of open GPUs of its node, and nothing is left out because it would be in vain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_worker_pool.core.queue.capacity import ROUNDING_MB, Capacity
from gpu_worker_pool.core.queue.node_index import SlotFacts, facts_of

from gpu_worker_pool.core.model.bounds import Thresholds
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.owners import Order, obstacle
from gpu_worker_pool.core.queue.placement import Grant, Survey
from gpu_worker_pool.core.queue.planner import Reserving
from gpu_worker_pool.core.queue.preemption import Preemption, spared
from gpu_worker_pool.core.queue.serve import QueuePass
from gpu_worker_pool.core.queue.withheld import Keeps


class PlainCapacity(Capacity):
    """Proposes GPUs by going through all of them."""

    def __init__(self, state: PoolState) -> None:
        super().__init__()
        known = (state.slots, state.settings, state.excluded, state.ignored_processes)
        self.refresh(state.slots.keys(), *known)  # names, and what nodes consist of
        self.all = {key: facts_of(slot, *known[1:]) for key, slot in state.slots.items()}
        self.open_on = {
            node: sum(bool(facts.is_open_to_exclusive) for key, facts in self.all.items() if key.node == node)
            for node in self.nodes
        }

    def _asked_for(self, wishes: Wishes) -> Iterator[tuple[GpuKey, SlotFacts, Any]]:
        for key, facts in self.all.items():
            gpu_class = facts.gpu_class
            if gpu_class is None or not matches_model(wishes.model, gpu_class.name):
                continue
            if wishes.node in {None, key.node} and (wishes.among is None or key in self.named(wishes.among)):
                yield key, facts, gpu_class

    def open_gpus(self, wishes: Wishes, thresholds: Thresholds, *, include_loaded: bool) -> Iterator[GpuKey]:
        found = sorted(
            (facts.percent + facts.load_percent, self.open_on[key.node], key.node, facts.gpu_index, key)
            for key, facts, _ in self._asked_for(wishes)
            if facts.is_open_to_exclusive and facts.percent is not None
            if facts.is_clear_to_exclusive or include_loaded
        )
        return (key for score, *_, key in found if score < sum(thresholds))

    def fitting_gpus(self, wishes: Wishes, thresholds: Thresholds, *, include_loaded: bool) -> Iterator[GpuKey]:
        found = []
        for key, facts, gpu_class in self._asked_for(wishes):
            if facts.is_open_to_shared and facts.committed_mb is not None:
                limit_mb = thresholds.memory_percent * (gpu_class.total_mb or 0.0) / 100
                left_mb = limit_mb - (wishes.memory_mb or 0.0) - facts.committed_mb
                is_whole = bool(facts.is_open_to_exclusive)
                fewest = self.open_on[key.node] if is_whole else 0
                if left_mb >= -ROUNDING_MB and (facts.is_clear_to_shared or include_loaded):
                    found.append((is_whole, left_mb, fewest, key.node, facts.gpu_index, key))
        return (key for *_, key in sorted(found))

    def nodes_with_room(self, wishes: Wishes, *, include_loaded: bool) -> Iterator[str]:
        found = []
        for node in {key.node for key, _, _ in self._asked_for(wishes)}:
            number = sum(
                bool(facts.is_clear_to_shared or (facts.is_open_to_shared and include_loaded))
                if wishes.is_shared
                else bool(facts.is_clear_to_exclusive or (facts.is_open_to_exclusive and include_loaded))
                for key, facts in self.all.items()
                if key.node == node
            )
            if number >= wishes.gpus:
                found.append((number, node))
        return (node for _, node in sorted(found))

    def open_gpus_of(self, node: str, *, shared: bool) -> Iterator[GpuKey]:
        found = [
            (facts.gpu_index, key)
            for key, facts in self.all.items()
            if key.node == node and (facts.is_open_to_shared if shared else facts.is_open_to_exclusive)
        ]
        return (key for _, key in sorted(found))


def plain_pass(state: PoolState, now: float) -> QueuePass:
    """A pass over the queue in which each waiter has its turn."""
    survey, keeps = Survey(state, now), Keeps(state, now)
    reserving, preemption = Reserving(state, now, keeps), Preemption(survey)
    found = QueuePass(undated=reserving.undated)
    gone: set[GpuKey] = set()
    for lease_id in Order(state, now).lease_ids():
        lease = state.queued(lease_id)
        line, wishes = state.queue.line_of(lease), lease.request.wishes
        if obstacle(state, line) is not None:
            continue
        kept = keeps.kept_from(line)
        gpus = survey.place(wishes, gone | kept)
        if gpus is not None:
            gpus = survey.with_home(gpus, lease, kept, gone)
            found.grants.append(Grant(lease_id, gpus))
            gone.update(gpus)
            if wishes.is_shared or state.settings.workers_per_gpu > 1 or state.queue.splits_owners:
                return found
            continue
        claimed = preemption.claim(wishes, gone | kept) if state.preemptible and not line.preemptible else None
        if claimed is not None:
            found.victims += claimed.victims
            if claimed.victims:
                return found
            found.claims.update(dict.fromkeys(claimed.gpus, lease_id))
            gone.update(claimed.gpus)
        elif keeps.reservation is None and reserving.is_due(lease):
            if found.grants and reserving.will_look(line):
                return found
            keeps.reservation = reserving.reserve(lease, line)
    found.reservation = keeps.reservation
    if state.making_room:
        found.spared = spared(state, {*found.claims, *(found.reservation.gpus if found.reservation else ())}, now)
    until = min(survey.holds_until, reserving.changes_at, keeps.change_at())
    found.settled_until = None if found.spared else until
    return found
