"""What the pool's rules are compared with in benchmarks/replay.py.

The core takes the first eligible GPU (or node) that its indexes propose. So another placement is another order of
proposals: a `Capacity` that proposes differently, handed to an otherwise unchanged core. The product knows of none.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from openb import GPU_MB

from gpu_worker_pool.core.capacity import Capacity, Entry
from gpu_worker_pool.core.gpu import GpuKey
from gpu_worker_pool.core.request import Wishes, matches_model
from gpu_worker_pool.core.settings import PoolSettings, Thresholds
from gpu_worker_pool.core.slot import GpuSlot


class NodeCapacity(Capacity):
    """Proposes node by node. Keeps what is free on each node, in megabytes of its GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: Mapping[GpuKey, GpuSlot] = {}
        self.gpus_of: dict[str, list[GpuKey]] = defaultdict(list)
        self.free_mb: dict[GpuKey, float] = {}
        self.free_on: dict[str, float] = {}

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
            if key not in self.free_mb:
                self.gpus_of[key.node].append(key)
            self.free_mb[key] = _free_mb(slots[key])
        for node in {key.node for key in touched}:
            self.change(node, sum(self.free_mb[key] for key in self.gpus_of[node]))
        return super().refresh(touched, slots, settings, excluded, ignored_processes)

    def change(self, node: str, free_mb: float) -> None:
        """So much is free on a node now."""
        self.free_on[node] = free_mb

    def usable(self, node: str, wishes: Wishes) -> list[GpuKey]:
        """The GPUs of a node that have the room, the tightest first."""
        asked_mb = GPU_MB if wishes.memory_mb is None else wishes.memory_mb
        found = [
            key
            for key in self.gpus_of[node]
            if self.free_mb[key] >= asked_mb and matches_model(wishes.model, _name(self.slots[key]))
        ]
        return sorted(found, key=lambda key: self.free_mb[key])

    def proposals(self, wishes: Wishes) -> Iterator[str]:
        """Nodes in the order in which they are tried."""
        raise NotImplementedError

    def open_gpus(self, wishes: Wishes, thresholds: Thresholds, *, include_loaded: bool) -> Iterator[GpuKey]:
        del thresholds, include_loaded
        for node in self.proposals(wishes):
            yield from self.usable(node, wishes)

    def fitting_gpus(self, wishes: Wishes, thresholds: Thresholds, *, include_loaded: bool) -> Iterator[GpuKey]:
        return self.open_gpus(wishes, thresholds, include_loaded=include_loaded)

    def nodes_with_room(self, wishes: Wishes, *, include_loaded: bool) -> Iterator[str]:
        del include_loaded
        return (node for node in self.proposals(wishes) if len(self.usable(node, wishes)) >= wishes.gpus)


class BestFit(NodeCapacity):
    """The node with the least GPU left that has enough; there, the GPU with the least left."""

    def __init__(self) -> None:
        super().__init__()
        self.by_free: list[tuple[float, str]] = []

    def change(self, node: str, free_mb: float) -> None:
        if node in self.free_on:
            del self.by_free[bisect_left(self.by_free, (self.free_on[node], node))]
        insort(self.by_free, (free_mb, node))
        super().change(node, free_mb)

    def proposals(self, wishes: Wishes) -> Iterator[str]:
        asked_mb = wishes.gpus * (GPU_MB if wishes.memory_mb is None else wishes.memory_mb)
        for place in range(bisect_left(self.by_free, (asked_mb,)), len(self.by_free)):
            yield self.by_free[place][1]


class Random(NodeCapacity):
    """Any node that has enough; there, any GPU."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.node_names: list[str] = []

    def change(self, node: str, free_mb: float) -> None:
        if node not in self.free_on:
            self.node_names.append(node)
        super().change(node, free_mb)

    def usable(self, node: str, wishes: Wishes) -> list[GpuKey]:
        found = super().usable(node, wishes)
        self.rng.shuffle(found)
        return found

    def proposals(self, wishes: Wishes) -> Iterator[str]:
        asked_mb = wishes.gpus * (GPU_MB if wishes.memory_mb is None else wishes.memory_mb)
        # A few blind draws mostly do while there is room; then all that have enough, in a random order.
        for node in self.rng.choices(self.node_names, k=8):
            if self.free_on[node] >= asked_mb:
                yield node
        left = [node for node in self.node_names if self.free_on[node] >= asked_mb]
        self.rng.shuffle(left)
        yield from left


class NoHolds(Capacity):
    """Our placement, and nobody who waits holds anything: whoever fits is served, in order."""

    def nodes_by_room(self, wishes: Wishes, *, include_loaded: bool) -> Iterator[Entry]:
        del wishes, include_loaded
        return iter(())

    def shared_gpus_by_commitment(self, wishes: Wishes) -> Iterator[GpuKey]:
        del wishes
        return iter(())


@dataclass(frozen=True)
class Policy:
    """A way to hand GPUs out. With `is_strict` nobody is asked for while somebody ahead waits."""

    name: str
    says: str
    capacity: Callable[[random.Random], Capacity]
    is_strict: bool = False
    is_placement: bool = True


OURS = Policy("ours", "the pool as it is", lambda _: Capacity())
POLICIES = (
    OURS,
    Policy("random", "any node that has enough, there any GPU; our queue", Random),
    Policy("best fit", "the node with the least left that has enough, there the tightest GPU; our queue", lambda _: BestFit()),
    Policy("no holds", "our placement; who waits holds nothing", lambda _: NoHolds(), is_placement=False),
    Policy(
        "strict FIFO", "our placement; nobody passes who waits", lambda _: Capacity(), is_strict=True, is_placement=False
    ),
)


def _free_mb(slot: GpuSlot) -> float:
    taken_mb = sum(GPU_MB if occupant.asked_mb is None else occupant.asked_mb for occupant in slot.occupants.values())
    return GPU_MB - taken_mb


def _name(slot: GpuSlot) -> str:
    return slot.reading.gpu.name if slot.reading else ""
