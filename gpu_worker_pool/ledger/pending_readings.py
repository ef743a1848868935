"""Readings that wait to be taken in: one turn of the event loop has no time for those of a whole fleet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from gpu_worker_pool.core.model.gpu import GpuKey, Reading
from gpu_worker_pool.core.model.state import PoolState

# Processes and leases on the GPUs whose readings are taken in at a time.
MOST_ON_GPUS = 100


class PendingReadings:
    """The latest reading of each GPU. One that is replaced by a newer one keeps its place, so that each has its turn."""

    def __init__(self) -> None:
        self._by_gpu: OrderedDict[GpuKey, Reading] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._by_gpu)

    def add(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            self._by_gpu[reading.gpu.key] = reading

    def drop(self, keys: Iterable[GpuKey]) -> None:
        for key in keys:
            self._by_gpu.pop(key, None)

    def drop_node(self, node: str) -> None:
        self.drop([key for key in self._by_gpu if key.node == node])

    def clear(self) -> None:
        self._by_gpu.clear()

    def take(self, state: PoolState) -> tuple[Reading, ...]:
        """The next of them, as many as one turn has time for."""
        taken: list[Reading] = []
        weight = 0
        while self._by_gpu and weight < MOST_ON_GPUS:
            key, reading = self._by_gpu.popitem(last=False)
            slot = state.slots.get(key)
            taken.append(reading)
            weight += 1 + len(reading.processes or ()) + (len(slot.occupants) if slot else 0)
        return tuple(taken)
