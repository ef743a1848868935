"""Attempts to meet wishes at one instant. Those for as much as has failed, or more, are not made."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Generic, TypeVar

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes

from .placement import NOTHING

T = TypeVar("T")
# Any model, any of the GPUs, any node.
ANY = (None, None, None)


class Attempts(Generic[T]):
    """Calls `find` with wishes and the GPUs to avoid. In one pass over the queue, GPUs that are taken stay taken, so what
    has failed fails until its end. That way a queue of many different wishes costs little more than one of few.
    """

    def __init__(self, find: Callable[[Wishes, AbstractSet[GpuKey]], T | None]) -> None:
        self._find = find
        # (GPUs on each node, nodes, MB) by what else was asked for.
        self._failed: dict[tuple[object, ...], list[tuple[int, int, float]]] = {}

    def make(self, wishes: Wishes, kept: AbstractSet[GpuKey], taken: AbstractSet[GpuKey] = NOTHING) -> T | None:
        """What is found without the GPUs that are kept from this waiter, and those that are taken from all."""
        if self.must_fail(wishes, kept):
            return None
        found = self._find(wishes, taken | kept if taken else kept)
        if found is None:
            amount = (wishes.gpus, wishes.nodes, wishes.memory_mb or 0.0)
            self._failed.setdefault((kept, *_terms(wishes), *_places(wishes)), []).append(amount)
        return found

    def can_make(self, wishes: Wishes, kept: AbstractSet[GpuKey], taken: AbstractSet[GpuKey]) -> bool:
        return self.make(wishes, kept, taken) is not None

    def must_fail(self, wishes: Wishes, kept: AbstractSet[GpuKey]) -> bool:
        """Whether a wish for as much or less has failed, of which no other GPUs were kept: for the same GPUs or for any."""
        if not self._failed:
            return False
        terms, own, memory_mb = _terms(wishes), _places(wishes), wishes.memory_mb or 0.0
        for kept_then in (kept, NOTHING) if kept else (NOTHING,):
            for among in (ANY,) if own == ANY else (own, ANY):
                for gpus, nodes, least_mb in self._failed.get((kept_then, *terms, *among), ()):
                    if wishes.gpus >= gpus and wishes.nodes >= nodes and memory_mb >= least_mb:
                        return True
        return False


def _terms(wishes: Wishes) -> tuple[object, ...]:
    return (wishes.is_shared, wishes.memory_threshold_percent, wishes.utilization_threshold_percent)


def _places(wishes: Wishes) -> tuple[object, ...]:
    return (wishes.model, wishes.among, wishes.node)
