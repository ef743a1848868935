"""What the pool knows of one GPU, and which lease its memory belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from .gpu import GpuKey, GpuProcess, ProcessId, Reading


@dataclass(frozen=True, slots=True)
class Occupant:
    """A lease on a GPU. `asked_mb` is None if it is exclusive. Memory of the holder's `process` is the lease's."""

    asked_mb: float | None
    process: ProcessId | None = None
    is_draining: bool = False


@dataclass(slots=True)
class GpuSlot:
    """One GPU in the pool. `occupants` are the leases on it, active or draining, in the order of their grants. `members`
    are the processes that were seen to belong to each of them.
    """

    key: GpuKey
    reading: Reading | None = None
    occupants: dict[str, Occupant] = field(default_factory=dict)
    members: dict[str, tuple[ProcessId, ...]] = field(default_factory=dict)

    @property
    def is_shared(self) -> bool:
        return any(occupant.asked_mb is not None for occupant in self.occupants.values())

    def is_open_for(self, *, shared: bool, workers_per_gpu: int) -> bool:
        """Whether its occupants admit one more lease of this kind. Thresholds and memory are judged elsewhere."""
        if not self.occupants:
            return True
        if any(occupant.is_draining for occupant in self.occupants.values()):
            return False
        if shared:
            return self.is_shared
        return not self.is_shared and len(self.occupants) < workers_per_gpu

    def without_draining(self) -> GpuSlot:
        active = {lease_id: occupant for lease_id, occupant in self.occupants.items() if not occupant.is_draining}
        return GpuSlot(self.key, self.reading, active, self.members)

    def attribute(self, processes: Iterable[GpuProcess]) -> dict[str, tuple[ProcessId, ...]]:
        """The processes of each occupant: its holder, descendants of the holder, and processes that were the lease's
        before (a process whose parent died keeps its lease). The nearest ancestor decides. Of leases with the same
        holder, active ones come before draining ones.
        """
        roots: dict[str, list[ProcessId]] = {}
        for lease_id, occupant in self.occupants.items():
            roots[lease_id] = list(self.members.get(lease_id, ()))
            if occupant.process is not None:
                roots[lease_id].append(occupant.process)
        members: dict[str, list[ProcessId]] = {lease_id: [] for lease_id in self.occupants}
        for process in processes:
            for owner in self._nearest(process, roots):
                members[owner].append(process.id)
        return {lease_id: tuple(found) for lease_id, found in members.items()}

    def _nearest(self, process: GpuProcess, roots: Mapping[str, Sequence[ProcessId]]) -> list[str]:
        for link in (process.id, *process.ancestors):
            owners = [lease_id for lease_id, own in roots.items() if any(link.is_same(root) for root in own)]
            if owners:
                return [owner for owner in owners if not self.occupants[owner].is_draining] or owners
        return []


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of a GPU in MB, by lease.

    `by_lease` is the larger of what a lease asked for and what its processes hold. `outside_mb` belongs to no lease. No
    lease is counted twice, once as asked and once as observed.
    """

    by_lease: Mapping[str, float]
    outside_mb: float

    @property
    def committed_mb(self) -> float:
        return sum(self.by_lease.values()) + self.outside_mb


def memory_use(slot: GpuSlot, ignored_processes: AbstractSet[str]) -> MemoryUse | None:
    """Split the used memory between leases and outside use; None if it is unknown how much is used.

    Memory may have no known owner: there is no process list, or a process does not report its memory. Then it counts
    for the leases in question up to what they asked for, and only the rest counts as outside use.
    """
    reading = slot.reading
    if reading is None or reading.memory_used_mb is None:
        return None
    unexplained_mb = reading.memory_used_mb
    observed_mb = dict.fromkeys(slot.occupants, 0.0)
    asked_mb = {lease_id: occupant.asked_mb or 0.0 for lease_id, occupant in slot.occupants.items()}
    # Leases whose processes cannot all be measured may own part of the memory without an owner.
    unweighed = {lease_id for lease_id in slot.occupants if reading.processes is None or _is_unknown(slot, lease_id)}
    for process in reading.processes or ():
        owners = _owners(slot, process.id)
        if process.memory_mb is None:
            unweighed.update(owners)
        elif owners:
            _share_out(process.memory_mb, owners, asked_mb, observed_mb)
            unexplained_mb -= process.memory_mb
        elif process.name in ignored_processes:
            unexplained_mb -= process.memory_mb
    by_lease: dict[str, float] = {}
    for lease_id in slot.occupants:
        by_lease[lease_id] = max(asked_mb[lease_id], observed_mb[lease_id])
        if lease_id in unweighed and slot.occupants[lease_id].asked_mb is None:
            # An exclusive lease owns all memory that has no other owner.
            by_lease[lease_id] += max(unexplained_mb, 0.0)
            unexplained_mb = 0.0
        elif lease_id in unweighed:
            unexplained_mb -= min(max(unexplained_mb, 0.0), by_lease[lease_id] - observed_mb[lease_id])
    return MemoryUse(by_lease, max(unexplained_mb, 0.0))


def _share_out(
    memory_mb: float, owners: Sequence[str], asked_mb: Mapping[str, float], observed_mb: dict[str, float]
) -> None:
    """Assign memory to its owners: to each up to what it asked for, and the rest to the first."""
    for owner in owners:
        part_mb = min(memory_mb, max(asked_mb[owner] - observed_mb[owner], 0.0))
        observed_mb[owner] += part_mb
        memory_mb -= part_mb
    observed_mb[owners[0]] += memory_mb


def used_percent(slot: GpuSlot, ignored_processes: AbstractSet[str]) -> float | None:
    """Measured memory in percent, without that of ignored processes; None if unknown."""
    reading = slot.reading
    if reading is None:
        return None
    used_mb = reading.memory_used_mb
    if not ignored_processes or reading.processes is None or used_mb is None or not reading.memory_total_mb:
        return reading.memory_percent
    ignored_mb = sum(p.memory_mb or 0.0 for p in reading.processes if p.name in ignored_processes)
    return 100.0 * max(used_mb - ignored_mb, 0.0) / reading.memory_total_mb


def is_used_by_leases_only(slot: GpuSlot, ignored_processes: AbstractSet[str]) -> bool:
    """Whether every process on it belongs to a lease or is ignored."""
    processes = slot.reading.processes if slot.reading else None
    if not slot.occupants or processes is None:
        return False
    return all(_owners(slot, p.id) or p.name in ignored_processes for p in processes)


@dataclass(frozen=True, slots=True)
class ProcessOwnership:
    """The leases of a process. `is_outside`: it has none; None if the processes of some lease there are unknown."""

    lease_ids: tuple[str, ...]
    is_outside: bool | None
    is_ignored: bool


def attribute_processes(
    slot: GpuSlot, ignored_processes: AbstractSet[str]
) -> list[tuple[GpuProcess, ProcessOwnership]]:
    """All processes on a GPU, each with its ownership, by the same rules as `memory_use`."""
    processes = slot.reading.processes if slot.reading else None
    if not processes:
        return []
    is_somebody_unknown = any(_is_unknown(slot, lease_id) for lease_id in slot.occupants)
    found = []
    for process in processes:
        owners, is_ignored = tuple(_owners(slot, process.id)), process.name in ignored_processes
        is_outside = None if is_somebody_unknown and not owners and not is_ignored else not owners
        found.append((process, ProcessOwnership(owners, is_outside, is_ignored)))
    return found


def _is_unknown(slot: GpuSlot, lease_id: str) -> bool:
    return slot.occupants[lease_id].process is None and lease_id not in slot.members


def _owners(slot: GpuSlot, process: ProcessId) -> list[str]:
    return [
        lease_id for lease_id, members in slot.members.items() if any(process.is_same(member) for member in members)
    ]
