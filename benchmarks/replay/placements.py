"""The placements that benchmarks/replay compares ours with: other orders in which nodes and their GPUs are proposed.

The queue is served by the rule of the core, with a `Placer` that takes the first proposal that will do. What is proposed
follows what is free on each GPU, which is noted whenever the core derives its facts again. The package has none of these.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import islice

from benchmarks.replay.fragmentation import Kind, least_growth
from benchmarks.replay.openb import GPU_MILLI, MB_PER_MILLI
from gpu_worker_pool.core.model.facts import PoolFacts
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.placement import NOTHING, Placer


class Proposals(PoolFacts, ABC):
    """The facts of a pool, and what is free on each GPU, in thousandths of it. Proposes GPUs node by node."""

    def __init__(self) -> None:
        super().__init__()
        self.gpus_on: dict[str, list[GpuKey]] = defaultdict(list)
        self.free_milli: dict[GpuKey, int] = {}

    def refresh(
        self,
        touched: Collection[GpuKey],
        slots: Mapping[GpuKey, GpuSlot],
        settings: PoolSettings,
        excluded: Container[GpuKey],
        ignored_processes: Collection[str],
    ) -> bool:
        has_changed = super().refresh(touched, slots, settings, excluded, ignored_processes)
        for key in sorted(touched):
            if key not in self.free_milli:
                self.gpus_on[key.node].append(key)
            self.free_milli[key] = _free_milli(slots[key])
        for node in sorted({key.node for key in touched}):
            self.changed(node)
        return has_changed

    @abstractmethod
    def changed(self, node: str) -> None:
        """Update what is known of a node whose free capacity has changed."""

    @abstractmethod
    def proposals(self, wishes: Wishes) -> Iterator[tuple[str, list[GpuKey]]]:
        """Yield candidate nodes with their GPUs that have the room, both in the order in which to try them."""

    def usable(self, node: str, wishes: Wishes) -> list[GpuKey]:
        """Return the GPUs of a node that have the room."""
        milli = milli_of(wishes)
        return [
            key
            for key in self.gpus_on[node]
            if self.free_milli[key] >= milli and matches_model(wishes.model, self.model_of(key))
        ]

    def model_of(self, key: GpuKey) -> str:
        return self.of(key).name or ""


class OtherPlacer(Placer):
    """Takes the GPUs that are proposed first."""

    def __init__(self, state: PoolState, now: float, proposals: Proposals) -> None:
        super().__init__(state, now)
        self._proposals = proposals

    def place(self, wishes: Wishes, avoiding: AbstractSet[GpuKey] = NOTHING) -> tuple[GpuKey, ...] | None:
        assert wishes.nodes == 1, "no task of the trace is for several nodes"
        for _, keys in self._proposals.proposals(wishes):
            usable = (key for key in keys if key not in avoiding and self.is_eligible(key, wishes))
            if len(gpus := tuple(islice(usable, wishes.gpus))) == wishes.gpus:
                return gpus
        return None


class BestFit(Proposals):
    """Takes the node with the least free GPU capacity that is enough, and there the GPU with the least free."""

    def __init__(self) -> None:
        super().__init__()
        self._free_on: dict[str, int] = {}
        self._by_free: list[tuple[int, str]] = []

    def changed(self, node: str) -> None:
        if node in self._free_on:
            del self._by_free[bisect_left(self._by_free, (self._free_on[node], node))]
        self._free_on[node] = sum(self.free_milli[key] for key in self.gpus_on[node])
        insort(self._by_free, (self._free_on[node], node))

    def proposals(self, wishes: Wishes) -> Iterator[tuple[str, list[GpuKey]]]:
        for place in range(bisect_left(self._by_free, (wishes.gpus * milli_of(wishes),)), len(self._by_free)):
            node = self._by_free[place][1]
            yield node, sorted(self.usable(node, wishes), key=lambda key: self.free_milli[key])


class Random(Proposals):
    """Takes any node that has enough, and there any GPU."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._free_on: dict[str, int] = {}

    def changed(self, node: str) -> None:
        self._free_on[node] = sum(self.free_milli[key] for key in self.gpus_on[node])

    def proposals(self, wishes: Wishes) -> Iterator[tuple[str, list[GpuKey]]]:
        asked_milli = wishes.gpus * milli_of(wishes)
        nodes = [node for node, free in self._free_on.items() if free >= asked_milli]
        while nodes:
            # Drawn one after the other, because the first few are mostly enough.
            place = self._rng.randrange(len(nodes))
            nodes[place], nodes[-1] = nodes[-1], nodes[place]
            node = nodes.pop()
            keys = self.usable(node, wishes)
            self._rng.shuffle(keys)
            yield node, keys


class LeastFragmentation(Proposals):
    """Takes the node where fragmentation grows least: FGD of that paper, for GPUs alone. It must know the work in advance."""

    def __init__(self, kinds: tuple[Kind, ...]) -> None:
        super().__init__()
        self._kinds = kinds
        self._looks: dict[str, tuple[tuple[int, ...], str]] = {}
        self._alike: dict[tuple[tuple[int, ...], str], list[str]] = {}

    def changed(self, node: str) -> None:
        if node in self._looks:
            alike = self._alike[self._looks[node]]
            alike.remove(node)
            if not alike:
                del self._alike[self._looks[node]]
        keys = self.gpus_on[node]
        self._looks[node] = (tuple(sorted(self.free_milli[key] for key in keys)), self.model_of(keys[0]))
        insort(self._alike.setdefault(self._looks[node], []), node)

    def proposals(self, wishes: Wishes) -> Iterator[tuple[str, list[GpuKey]]]:
        milli = milli_of(wishes)
        ranked = [
            (*growth, nodes)
            for look, nodes in self._alike.items()
            if (growth := least_growth(*look, wishes.gpus, milli, self._kinds)) is not None
        ]
        for _, left, nodes in sorted(ranked):
            for node in tuple(nodes):
                yield node, sorted(self.usable(node, wishes), key=lambda key: abs(self.free_milli[key] - left))


def milli_of(wishes: Wishes) -> int:
    """Return how much of each GPU the wishes ask for."""
    return GPU_MILLI if wishes.memory_mb is None else round(wishes.memory_mb / MB_PER_MILLI)


def _free_milli(slot: GpuSlot) -> int:
    taken_mb = [occupant.asked_mb for occupant in slot.occupants.values()]
    return GPU_MILLI - sum(GPU_MILLI if mb is None else round(mb / MB_PER_MILLI) for mb in taken_mb)
