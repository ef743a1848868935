"""Chooses among the eligible GPUs.

- One exclusive GPU: the lowest memory + utilization; of equals, on the node with the fewest open GPUs.
- One share of a GPU: a GPU with other shares, with the tightest fit. If it fits on none, a whole GPU with the tightest
  fit; of equals, on the node with the fewest open GPUs. So shared GPUs fill up first, and whole GPUs and nodes stay
  whole.
- Several GPUs: the node with the fewest open GPUs that has enough; of one model if possible, and of the model with the
  fewest, so that what remains is as large as possible.
- A gang: the first so many nodes by the same rules. The node of its holder's process is one of them if it has room.

A tight fit leaves little memory. This is best fit and needs no knowledge of later requests; benchmarks/replay
compares it with other rules on a real trace.

Ties are broken by node name and GPU index, so the same state always gives the same answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import inf

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot, memory_use
from gpu_worker_pool.core.model.state import PoolState

from .eligibility import judge, stale_at
from .verdicts import Eligible, NoRoom, Verdict

NOTHING: frozenset[GpuKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Grant:
    lease_id: str
    gpus: tuple[GpuKey, ...]


class Survey:
    """Judges the pool at one instant.

    `holds_until` is how long the findings stay true if no event happens: with time, readings become stale.
    """

    def __init__(self, state: PoolState, now: float) -> None:
        self.state = state
        self.now = now
        self.holds_until = inf

    def judge(self, slot: GpuSlot, wishes: Wishes) -> Verdict:
        verdict = judge(self.state, slot, wishes, self.now)
        if slot.reading is not None and isinstance(verdict, (Eligible, NoRoom)):
            # Both need a fresh reading, and lead to a grant or a hold.
            self.holds_until = min(self.holds_until, stale_at(self.state, slot.reading))
        return verdict

    def score(self, slot: GpuSlot, wishes: Wishes) -> float | None:
        verdict = self.judge(slot, wishes)
        return verdict.score if isinstance(verdict, Eligible) else None

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
        self, gpus: tuple[GpuKey, ...], lease: QueuedLease, *avoiding: AbstractSet[GpuKey]
    ) -> tuple[GpuKey, ...]:
        """The place of a gang, moved so that it has a part on the node of its holder's process, if there is room: the process
        can then be that part of it.
        """
        wishes, home = lease.request.wishes, lease.request.holder.node
        if wishes.nodes == 1 or home is None or any(key.node == home for key in gpus):
            return gpus
        avoided = NOTHING.union(*avoiding)
        own = self.place(replace(wishes, nodes=1, node=home), avoided)
        if own is None:
            return gpus
        there = (slot.key for slot in self.state.slots_on(home))
        others = self.place(replace(wishes, nodes=wishes.nodes - 1), avoided.union(there))
        return gpus if others is None else tuple(sorted((*own, *others), key=lambda key: key.node))

    def _single_gpus(self, wishes: Wishes, avoiding: AbstractSet[GpuKey]) -> Iterator[tuple[GpuKey, ...]]:
        """Each GPU that will do, the best first."""
        for key in self._candidates(wishes):
            if key not in avoiding and isinstance(self.judge(self.state.slots[key], wishes), Eligible):
                yield (key,)

    def _several_gpus(self, wishes: Wishes, avoiding: AbstractSet[GpuKey]) -> Iterator[tuple[GpuKey, ...]]:
        """So many GPUs of each node that has enough, the best node first."""
        for node in self.state.capacity.nodes_with_room(wishes, include_loaded=self.is_lax(wishes)):
            usable = self.usable_on(node, wishes, avoiding)
            if len(usable) >= wishes.gpus:
                yield self._choose_several(usable, wishes)

    def usable_on(
        self, node: str, wishes: Wishes, avoiding: AbstractSet[GpuKey] = NOTHING
    ) -> list[tuple[GpuSlot, float]]:
        return [
            (slot, score)
            for key in self.state.capacity.open_gpus_of(node, shared=wishes.is_shared)
            if key not in avoiding and (score := self.score(slot := self.state.slots[key], wishes)) is not None
        ]

    def most_room_mb(self, wishes: Wishes) -> float:
        """Requests like this one cannot be served if they need more of each GPU than this; below 0: nor can others."""
        thresholds = self.state.settings.thresholds_for(wishes)
        return self.state.capacity.most_room_mb(wishes, thresholds, include_loaded=self.is_lax(wishes))

    def is_lax(self, wishes: Wishes) -> bool:
        """Whether GPUs that are not clear may do (see capacity.py); only then are they considered."""
        settings = self.state.settings
        if wishes.memory_threshold_percent is None and wishes.utilization_threshold_percent is None:
            return False
        own, wished = settings.thresholds, settings.thresholds_for(wishes)
        if not (wishes.is_shared or settings.outsiders == "thresholds" or settings.avoids_outsiders(wishes)):
            return True
        return wished.memory_percent > own.memory_percent or wished.utilization_percent > own.utilization_percent

    def _candidates(self, wishes: Wishes) -> Iterator[GpuKey]:
        capacity = self.state.capacity
        find = capacity.fitting_gpus if wishes.is_shared else capacity.open_gpus
        return find(wishes, self.state.settings.thresholds_for(wishes), include_loaded=self.is_lax(wishes))

    def _choose_several(self, usable: list[tuple[GpuSlot, float]], wishes: Wishes) -> tuple[GpuKey, ...]:
        by_model: dict[str, list[tuple[float, int, GpuKey]]] = defaultdict(list)
        for slot, score in usable:
            reading = slot.reading
            assert reading  # noqa: S101 - an eligible GPU has been read
            use = memory_use(slot, self.state.ignored_processes) if wishes.is_shared else None
            # Shares go where the least room is left, exclusive leases where the least is used.
            rank = score if use is None else (reading.memory_total_mb or 0.0) - use.committed_mb
            by_model[reading.gpu.name].append((rank, reading.gpu.index, slot.key))
        enough = [sorted(group) for group in by_model.values() if len(group) >= wishes.gpus]
        if enough:
            ranked = min(enough, key=lambda group: (len(group), sum(rank for rank, _, _ in group[: wishes.gpus])))
        else:
            ranked = sorted(entry for group in by_model.values() for entry in group)
        return tuple(key for _, _, key in sorted(ranked[: wishes.gpus], key=lambda entry: entry[1]))
