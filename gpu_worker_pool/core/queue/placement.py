"""Chooses among the eligible GPUs.

- One exclusive GPU: the lowest memory + utilization; of equals, on the node with the fewest open GPUs.
- One share of a GPU: a GPU with other shares, with the tightest fit. If it fits on none, a whole GPU with the tightest
  fit; of equals, on the node with the fewest open GPUs. So shared GPUs fill up first, and whole GPUs and nodes stay
  whole.
- Several GPUs: the node with the fewest open GPUs that has enough; of one model if possible, and of the model with the
  fewest, so that what remains is as large as possible. Of these, neighbours: the GPUs with the smallest steps between their
  positions, out of the shortest row of such GPUs, from one end of it, so that long rows stay whole.
- A gang: its number of nodes, by the same rules. The node of its holder's process is one of them if it has room.

A tight fit leaves little memory. This is best fit and needs no knowledge of later requests; benchmarks/replay
measures on a real trace how much of the GPUs it can allocate.

Ties are broken by node name and GPU index, so the same state always gives the same answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from heapq import heapify, heappop
from itertools import chain, pairwise
from math import inf
from typing import Any, NamedTuple

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.state import PoolState

from .eligibility import judge, stale_at
from .verdicts import Verdict

NOTHING: frozenset[GpuKey] = frozenset()
# Below it, by memory and utilization together, nothing computes on a GPU.
IDLE_PERCENT = 10.0
# Sums of floats may differ in the last bits from those of `judge`, which decides such close cases.
ROUNDING_MB = 1e-3


class Grant(NamedTuple):
    lease_id: str
    gpus: tuple[GpuKey, ...]


class Placer:
    """Places requests at one instant.

    `holds_until` is how long the findings stay true if no event happens: with time, readings become stale.
    """

    def __init__(self, state: PoolState, now: float) -> None:
        self.state = state
        self.now = now
        self.holds_until = inf

    def judge(self, slot: GpuSlot, wishes: Wishes) -> Verdict:
        found = judge(self.state, slot, wishes, self.now)
        if slot.reading is not None and found.code in {"eligible", "no_room"}:
            # Both need a fresh reading, and lead to a grant or a hold.
            self.holds_until = min(self.holds_until, stale_at(self.state, slot.reading))
        return found

    def is_eligible(self, key: GpuKey, wishes: Wishes) -> bool:
        return self.judge(self.state.slots[key], wishes).is_eligible

    def rank(self, key: GpuKey, wishes: Wishes) -> float:
        """Sorts usable GPUs: shares go where the least room is left, exclusive leases where the least is used."""
        facts = self.state.facts.of(key)
        return facts.room_mb if wishes.is_shared else (facts.percent or 0.0) + facts.load_percent

    def place(self, wishes: Wishes, avoiding: AbstractSet[GpuKey] = NOTHING) -> tuple[GpuKey, ...] | None:
        """The GPUs to grant, by node and index; None if there are not enough now."""
        found = self._single_gpus(wishes, avoiding) if wishes.gpus == 1 else self._several_gpus(wishes, avoiding)
        if wishes.nodes == 1:
            return next(found, None)
        by_node: dict[str, tuple[GpuKey, ...]] = {}
        for gpus in found:
            by_node.setdefault(gpus[0].node, gpus)
            if len(by_node) == wishes.nodes:
                return tuple(key for node in sorted(by_node) for key in by_node[node])
        return None

    def with_home(
        self, gpus: tuple[GpuKey, ...], lease: QueuedLease, avoiding: AbstractSet[GpuKey]
    ) -> tuple[GpuKey, ...]:
        """The place of a gang, moved so that it has a part on the node of its holder's process, if there is room: the process
        can then be that part of it.
        """
        wishes, home = lease.request.wishes, lease.request.holder.node
        if wishes.nodes == 1 or home is None or any(key.node == home for key in gpus):
            return gpus
        own = self.place(replace(wishes, nodes=1, node=home), avoiding)
        if own is None:
            return gpus
        there = (slot.key for slot in self.state.slots_on(home))
        others = self.place(replace(wishes, nodes=wishes.nodes - 1), avoiding | set(there))
        return gpus if others is None else tuple(sorted((*own, *others), key=lambda key: key.node))

    def _single_gpus(self, wishes: Wishes, avoiding: AbstractSet[GpuKey]) -> Iterator[tuple[GpuKey, ...]]:
        """Each GPU that will do, the best first."""
        proposed = list(self._shares(wishes) if wishes.is_shared else self._whole_gpus(wishes))
        heapify(proposed)
        named = self.state.facts.named(wishes)
        while proposed:
            key = heappop(proposed)[-1]
            if key not in avoiding and (named is None or key in named) and self.is_eligible(key, wishes):
                yield (key,)

    def _whole_gpus(self, wishes: Wishes) -> Iterator[tuple[Any, ...]]:
        """GPUs that are open to an exclusive lease, as (memory + utilization, open GPUs of its node, ..., key)."""
        model = wishes.model
        for name, node in self.state.facts.nodes_for(wishes):
            open_gpus = node.open_to_exclusive
            for key, facts in node.gpus.items() if open_gpus else ():
                if facts.is_open_to_exclusive and (model is None or matches_model(model, facts.name or "")):
                    assert facts.percent is not None  # noqa: S101 - it is measured
                    yield (facts.percent + facts.load_percent, open_gpus, name, facts.gpu_index, key)

    def _shares(self, wishes: Wishes) -> Iterator[tuple[Any, ...]]:
        """GPUs that have room for a share, as (is whole, the MB that would be left, ..., key)."""
        model, asked_mb = wishes.model, wishes.memory_mb or 0.0
        settings = self.state.settings
        part = settings.thresholds_for(wishes).memory_percent / 100
        is_within_pools = part <= settings.thresholds.memory_percent / 100
        for name, node in self.state.facts.nodes_for(wishes):
            if is_within_pools and node.most_room_mb < asked_mb - ROUNDING_MB:
                continue
            for key, facts in node.gpus.items():
                if facts.is_open_to_shared and facts.committed_mb is not None:
                    left_mb = part * (facts.total_mb or 0.0) - asked_mb - facts.committed_mb
                    if left_mb >= -ROUNDING_MB and (model is None or matches_model(model, facts.name or "")):
                        is_whole = bool(facts.is_open_to_exclusive)
                        yield (is_whole, left_mb, node.open_to_exclusive if is_whole else 0, name, facts.gpu_index, key)

    def _several_gpus(self, wishes: Wishes, avoiding: AbstractSet[GpuKey]) -> Iterator[tuple[GpuKey, ...]]:
        """The wished number of GPUs of each node that has enough, the best node first."""
        enough = []
        for name, node in self.state.facts.nodes_for(wishes):
            number = node.open_to_shared if wishes.is_shared else node.open_to_exclusive
            if number >= wishes.gpus:
                enough.append((number, name))
        for _, name in sorted(enough):
            usable = self._usable_on(name, wishes, avoiding)
            if len(usable) >= wishes.gpus:
                yield self._choose_several(usable, wishes)

    def _usable_on(self, node: str, wishes: Wishes, avoiding: AbstractSet[GpuKey]) -> list[GpuKey]:
        """The GPUs of a node that will do."""
        usable = []
        for key, facts in self.state.facts.nodes[node].gpus.items():
            is_open = facts.is_open_to_shared if wishes.is_shared else facts.is_open_to_exclusive
            if is_open and key not in avoiding and self.is_eligible(key, wishes):
                usable.append(key)
        return usable

    def _choose_several(self, usable: list[GpuKey], wishes: Wishes) -> tuple[GpuKey, ...]:
        by_model: dict[str, list[Rated]] = defaultdict(list)
        for key in usable:
            facts = self.state.facts.of(key)
            by_model[facts.name or ""].append(Rated(self.rank(key, wishes), facts.position, facts.gpu_index, key))
        enough = [group for group in by_model.values() if len(group) >= wishes.gpus]
        fewest = min(map(len, enough), default=0)
        groups = [group for group in enough if len(group) == fewest] or [[*chain(*by_model.values())]]
        _, best = min(choice for group in groups for choice in _choices(group, wishes))
        return tuple(entry.key for entry in sorted(best, key=lambda entry: (entry.gpu_index, entry.key)))


class Rated(NamedTuple):
    """A GPU that will do: one with a low rank is better, and neighbours have near positions."""

    rank: float
    position: float
    gpu_index: float
    key: GpuKey


def _choices(usable: list[Rated], wishes: Wishes) -> Iterator[tuple[tuple[object, ...], list[Rated]]]:
    """The GPUs that come into question, and what they are chosen by: for shares those with the least room. An exclusive lease
    gets the closest GPUs of a shortest row, from one end of it if possible. Idle GPUs come before others.
    """
    number = wishes.gpus
    if wishes.is_shared:
        fullest = sorted(sorted(usable)[:number], key=_place)
        yield (sum(entry.rank for entry in fullest), _place(fullest[0])), fullest
        return
    idle = [entry for entry in usable if entry.rank < IDLE_PERCENT]
    for row in _shortest_rows(sorted(idle if len(idle) >= number else usable, key=_place), number):
        last = len(row) - number
        for start in range(last + 1):
            chosen = row[start : start + number]
            span, is_inside = chosen[-1].position - chosen[0].position, 0 < start < last
            yield (span, is_inside, sum(entry.rank for entry in chosen), _place(chosen[0])), chosen


def _shortest_rows(usable: list[Rated], number: int) -> list[list[Rated]]:
    """The shortest rows of enough GPUs, with steps between neighbours that are as small as possible."""
    steps = [after.position - before.position for before, after in pairwise(usable)]
    for widest in sorted(set(steps)):
        rows = [usable[:1]]
        for step, entry in zip(steps, usable[1:], strict=True):
            if step > widest:
                rows.append([])
            rows[-1].append(entry)
        enough = [row for row in rows if len(row) >= number]
        if enough:
            shortest = min(map(len, enough))
            return [row for row in enough if len(row) == shortest]
    raise ValueError(f"{len(usable)} GPUs are not {number}")


def _place(entry: Rated) -> tuple[float, float, GpuKey]:
    return (entry.position, entry.gpu_index, entry.key)
