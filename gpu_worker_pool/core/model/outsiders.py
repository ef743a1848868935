"""Processes outside the pool: those on a GPU that belong to no lease."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf

from .gpu import GpuProcess, ProcessId
from .settings import PoolSettings
from .slot import GpuSlot, attribute_processes


@dataclass(frozen=True, slots=True)
class OutsideUse:
    """What processes outside the pool use of a GPU; the one with the most memory comes first.

    `memory_mb` is None if it is unknown of one of them. `utilization_percent` is None if it may be that of a lease.
    """

    processes: tuple[GpuProcess, ...]
    memory_mb: float | None
    utilization_percent: float | None

    @property
    def roots(self) -> frozenset[ProcessId]:
        """The processes that all of these are, or descend from."""
        families = [frozenset((process.id, *process.ancestors)) for process in self.processes]
        return frozenset.intersection(*families)


def outside_use(slot: GpuSlot, settings: PoolSettings, ignored_processes: AbstractSet[str]) -> OutsideUse | None:
    """What keeps a GPU from an exclusive lease: a process outside the pool computes there, or they hold more memory than
    a context. None if there is no such use, or no list of processes to tell it by. Unknown memory counts as much.
    """
    if slot.reading is None or not slot.reading.processes:
        return None
    found = attribute_processes(slot, ignored_processes)
    outside = [process for process, whose in found if whose.is_outside and not whose.is_ignored]
    if not outside:
        return None
    outside.sort(key=lambda process: (-_weight(process), process.id.pid))
    held_mb = sum(map(_weight, outside))
    # Of a lease and a process outside, either may be the one that computes.
    load_percent = None if slot.occupants else slot.reading.load_percent
    is_computing = load_percent is not None and load_percent >= settings.computing_percent
    if held_mb <= settings.context_mb and not is_computing:
        return None
    return OutsideUse(tuple(outside), None if held_mb == inf else held_mb, load_percent if is_computing else None)


def _weight(process: GpuProcess) -> float:
    return inf if process.memory_mb is None else process.memory_mb
