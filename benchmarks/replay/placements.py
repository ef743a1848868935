"""The placements that benchmarks/replay compares ours with.

The core takes the first eligible GPU (or node) that its indexes propose. So another placement is another order of
proposals: a `Capacity` that proposes differently, passed to an otherwise unchanged core. The package has none of these.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from gpu_worker_pool.core.queue.capacity import Capacity

from benchmarks.replay.fragmentation import Kind, least_growth
from benchmarks.replay.openb import GPU_MILLI, MB_PER_MILLI
from gpu_worker_pool.core.model.bounds import Thresholds
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.slot import GpuSlot


class NodeCapacity(Capacity, ABC):
    """Proposes GPUs node by node, by what is free on each, in thousandths of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: Mapping[GpuKey, GpuSlot] = {}
        self.gpus_on: dict[str, list[GpuKey]] = defaultdict(list)
        self.free_milli: dict[GpuKey, int] = {}

    def refresh(
        self,
        touched: AbstractSet[GpuKey],
        slots: Mapping[GpuKey, GpuSlot],
        settings: PoolSettings,
        excluded: Mapping[GpuKey, str],
        ignored_processes: AbstractSet[str],
    ) -> bool:
        self.slots = slots
        for key in sorted(touched):
            if key not in self.free_milli:
                self.gpus_on[key.node].append(key)
            self.free_milli[key] = _free_milli(slots[key])
        for node in sorted({key.node for key in touched}):
            self.changed(node)
        return super().refresh(touched, slots, settings, excluded, ignored_processes)

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
            if self.free_milli[key] >= milli and matches_model(wishes.model, _name(self.slots[key]))
        ]

    def open_gpus(self, wishes: Wishes, thresholds: Thresholds, *, include_loaded: bool) -> Iterator[GpuKey]:
        del thresholds, include_loaded
        for _, keys in self.proposals(wishes):
            yield from keys

    def fitting_gpus(self, wishes: Wishes, thresholds: Thresholds, *, include_loaded: bool) -> Iterator[GpuKey]:
        return self.open_gpus(wishes, thresholds, include_loaded=include_loaded)

    def nodes_with_room(self, wishes: Wishes, *, include_loaded: bool) -> Iterator[str]:
        del include_loaded
        return (node for node, keys in self.proposals(wishes) if len(keys) >= wishes.gpus)


class BestFit(NodeCapacity):
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


class Random(NodeCapacity):
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


class LeastFragmentation(NodeCapacity):
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
        self._looks[node] = (tuple(sorted(self.free_milli[key] for key in keys)), _name(self.slots[keys[0]]))
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


def _name(slot: GpuSlot) -> str:
    return slot.reading.gpu.name if slot.reading else ""
