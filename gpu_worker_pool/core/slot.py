"""What the pool knows of one GPU, and how much of its memory is spoken for."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from .gpu import GpuKey, GpuProcess, ProcessId, Reading


@dataclass(frozen=True, slots=True)
class Occupant:
    """A lease on a GPU: the memory it asked for (None: it did not say, so it shares with nobody who did), and the
    holder's process where that is known, so that memory on the GPU can be told to be its.
    """

    asked_mb: float | None
    process: ProcessId | None = None
    is_draining: bool = False


@dataclass(slots=True)
class GpuSlot:
    """One GPU in the pool.

    `occupants` are the leases on it, active or draining, in the order they came. `members` are the processes that
    were seen to belong to each of them.
    """

    key: GpuKey
    reading: Reading | None = None
    occupants: dict[str, Occupant] = field(default_factory=dict)
    members: dict[str, tuple[ProcessId, ...]] = field(default_factory=dict)

    @property
    def is_shared(self) -> bool:
        """Whether the leases on it said how much memory they need."""
        return any(occupant.asked_mb is not None for occupant in self.occupants.values())

    def is_open_for(self, *, shared: bool, workers_per_gpu: int) -> bool:
        """Whether its occupants leave a place for one more of this kind, thresholds and room aside."""
        if not self.occupants:
            return True
        if any(occupant.is_draining for occupant in self.occupants.values()):
            return False
        if shared:
            return self.is_shared
        return not self.is_shared and len(self.occupants) < workers_per_gpu

    def members_in(self, reading: Reading, lease_id: str) -> tuple[ProcessId, ...]:
        """Which of the processes in a reading are this lease's: its holder, what descends from it, and what was
        its before (a process whose parent died has lost its descent, not its owner).
        """
        roots = self.members.get(lease_id, ())
        holder = self.occupants[lease_id].process
        if holder is not None:
            roots = (holder, *roots)
        return tuple(process.id for process in reading.processes or () if _descends(process, roots))


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Whose the memory of a GPU is, in MB.

    `by_lease` is what each lease is reckoned with: what it asked for or what its processes hold, whichever is
    more. `outside_mb` belongs to no lease. A lease is never counted twice, once as asked and once as observed.
    """

    by_lease: Mapping[str, float]
    outside_mb: float

    @property
    def committed_mb(self) -> float:
        """What is spoken for."""
        return sum(self.by_lease.values()) + self.outside_mb


def memory_use(slot: GpuSlot, ignored_processes: AbstractSet[str]) -> MemoryUse | None:
    """Reckon whose the memory is; None where how much is used is unknown.

    Where it cannot be told whose some memory is (no process list, or a process whose memory is not reported), it
    is put down to the leases in question up to what they asked for, and only the rest to the outside.
    """
    reading = slot.reading
    if reading is None or reading.memory_used_mb is None:
        return None
    unexplained_mb = reading.memory_used_mb
    observed_mb = dict.fromkeys(slot.occupants, 0.0)
    # Leases whose processes cannot all be weighed may own some of what nobody else accounts for.
    unweighed = {
        lease_id
        for lease_id, occupant in slot.occupants.items()
        if reading.processes is None or (occupant.process is None and lease_id not in slot.members)
    }
    for process in reading.processes or ():
        owner = _owner(slot, process.id)
        if process.memory_mb is None:
            unweighed.update([owner] if owner else [])
        elif owner:
            observed_mb[owner] += process.memory_mb
            unexplained_mb -= process.memory_mb
        elif process.name in ignored_processes:
            unexplained_mb -= process.memory_mb
    by_lease: dict[str, float] = {}
    for lease_id, occupant in slot.occupants.items():
        reckoned_mb = max(occupant.asked_mb or 0.0, observed_mb[lease_id])
        by_lease[lease_id] = reckoned_mb
        if lease_id in unweighed:
            unexplained_mb -= min(max(unexplained_mb, 0.0), reckoned_mb - observed_mb[lease_id])
    return MemoryUse(by_lease, max(unexplained_mb, 0.0))


def used_percent(slot: GpuSlot, ignored_processes: AbstractSet[str]) -> float | None:
    """Measured memory in percent, less what processes that do not count hold; None where it is unknown."""
    reading = slot.reading
    if reading is None:
        return None
    if not ignored_processes or reading.processes is None or not reading.memory_total_mb:
        return reading.memory_percent
    ignored_mb = sum(p.memory_mb or 0.0 for p in reading.processes if p.name in ignored_processes)
    used_mb = reading.memory_used_mb
    return None if used_mb is None else 100.0 * max(used_mb - ignored_mb, 0.0) / reading.memory_total_mb


def is_used_by_leases_only(slot: GpuSlot, ignored_processes: AbstractSet[str]) -> bool:
    """Whether every process on it is known to belong to a lease (or not to count)."""
    processes = slot.reading.processes if slot.reading else None
    if not slot.occupants or processes is None:
        return False
    return all(_owner(slot, p.id) or p.name in ignored_processes for p in processes)


def _descends(process: GpuProcess, roots: tuple[ProcessId, ...]) -> bool:
    return any(link.is_same(root) for root in roots for link in (process.id, *process.ancestors))


def _owner(slot: GpuSlot, process: ProcessId) -> str | None:
    for lease_id, members in slot.members.items():
        if any(process.is_same(member) for member in members):
            return lease_id
    return None
