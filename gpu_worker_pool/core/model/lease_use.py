"""What a lease was seen to use of its GPUs. Unknown is None, never 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from .gpu import GpuKey
from .lease import ActiveLease
from .slot import GpuSlot


class LeaseUse(NamedTuple):
    """`peak_memory_mb` is the most on all its GPUs together. The utilizations that were read of them add up to
    `utilization_sum`, and are so many `samples`.
    """

    lease_id: str
    peak_memory_mb: float | None = None
    utilization_sum: float = 0.0
    samples: int = 0

    @property
    def is_known(self) -> bool:
        return self.peak_memory_mb is not None or self.samples > 0

    @property
    def mean_utilization_percent(self) -> float | None:
        return round(self.utilization_sum / self.samples, 1) if self.samples else None

    def with_memory(self, lease: ActiveLease, slots: Mapping[GpuKey, GpuSlot]) -> LeaseUse:
        """With the memory of the last readings, if that is known of all its GPUs."""
        parts = [_memory_mb(slots[key], lease.id) for key in lease.gpus]
        used_mb = sum(part for part in parts if part is not None)
        if None in parts or (self.peak_memory_mb is not None and used_mb <= self.peak_memory_mb):
            return self
        return self._replace(peak_memory_mb=used_mb)

    def with_utilization(
        self, lease: ActiveLease, slots: Mapping[GpuKey, GpuSlot], read: Collection[GpuKey]
    ) -> LeaseUse:
        """With the utilization of those of its GPUs that were just `read`. Of a shared GPU it is not known who computes."""
        if lease.request.wishes.is_shared:
            return self
        readings = [slots[key].reading for key in lease.gpus if key in read and _is_of_it(slots[key], lease.id)]
        seen = [each.utilization_percent for each in readings if each and each.utilization_percent is not None]
        return self._replace(utilization_sum=self.utilization_sum + sum(seen), samples=self.samples + len(seen))


def _is_of_it(slot: GpuSlot, lease_id: str) -> bool:
    """Whether the last reading of the GPU began after the grant."""
    return slot.reading is not None and slot.reading.at > slot.occupants[lease_id].since


def _memory_mb(slot: GpuSlot, lease_id: str) -> float | None:
    """The memory of a GPU that is the lease's alone; else that of the lease's processes, if all of them are known."""
    reading, occupant = slot.reading, slot.occupants[lease_id]
    if reading is None or not _is_of_it(slot, lease_id):
        return None
    if occupant.asked_mb is None:
        return reading.memory_used_mb
    if reading.processes is None or (occupant.process is None and lease_id not in slot.members):
        return None
    members = slot.attribute(reading.processes)[lease_id]
    own = [process.memory_mb for process in reading.processes if process.id in members]
    return None if None in own else sum(each for each in own if each is not None)
