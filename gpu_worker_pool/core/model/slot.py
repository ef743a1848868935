"""What the pool knows of one GPU, which lease its memory belongs to, and what processes outside the pool use of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from .gpu import Gpu, GpuKey, GpuProcess, InventoryGpu, ProcessId, Reading, findings_of
from .settings import PoolSettings


@dataclass(frozen=True, slots=True)
class Occupant:
    """A lease on a GPU. `asked_mb` is None if it is exclusive. Memory of the holder's `process` is the lease's. `since` is
    when it was granted: memory that was read before is not its own. A lease that drains after its holder released it
    `was_left`: the process may go on, and have the GPU again.
    """

    asked_mb: float | None
    process: ProcessId | None = None
    is_draining: bool = False
    was_left: bool = False
    since: float = field(default=-inf, compare=False)


# The processes with a pid, each with its lease.
ByPid = Mapping[int, Sequence[tuple[ProcessId, str]]]


def by_pid(processes: Iterable[tuple[str, Iterable[ProcessId]]]) -> ByPid:
    found: dict[int, list[tuple[ProcessId, str]]] = {}
    for lease_id, own in processes:
        for process in own:
            found.setdefault(process.pid, []).append((process, lease_id))
    return found


def leases_of(process: ProcessId, processes: ByPid) -> list[str]:
    found = processes.get(process.pid)
    return list(dict.fromkeys(lease_id for known, lease_id in found if process.is_same(known))) if found else []


@dataclass(slots=True)
class GpuSlot:
    """One GPU in the pool. `occupants` are the leases on it, active or draining, in the order of their grants. `members`
    are the processes that were seen to belong to each of them.
    """

    key: GpuKey
    reading: Reading | None = None
    occupants: dict[str, Occupant] = field(default_factory=dict)
    members: dict[str, tuple[ProcessId, ...]] = field(default_factory=dict)
    # As the inventory of its node has it.
    installed: InventoryGpu | None = None
    # When it was last seen to compute, or was granted; None if that is unknown.
    busy: float | None = None

    @property
    def gpu(self) -> Gpu | None:
        """As it was read last, else as the inventory has it; None if it is known by its leases only."""
        if self.reading is not None:
            return self.reading.gpu
        return None if self.installed is None else Gpu(self.key, self.installed.index, self.installed.name)

    @property
    def is_shared(self) -> bool:
        return any(occupant.asked_mb is not None for occupant in self.occupants.values())

    @property
    def is_draining(self) -> bool:
        return any(occupant.is_draining for occupant in self.occupants.values())

    def is_read_as(self, reading: Reading) -> bool:
        """Whether a newer reading says of the GPU and its leases what the last one did."""
        known = self.reading
        return (
            known is not None
            and findings_of(known) == findings_of(reading)
            # Memory that was read before a grant is not the lease's.
            and all(known.at > occupant.since for occupant in self.occupants.values())
        )

    def is_open_for(self, *, shared: bool, max_sharers: int) -> bool:
        """Whether its occupants admit one more lease of this kind. Thresholds and memory are judged elsewhere."""
        if not self.occupants:
            return True
        return shared and self.is_shared and not self.is_draining and len(self.occupants) < max_sharers

    def without_draining(self) -> GpuSlot:
        active = {lease_id: occupant for lease_id, occupant in self.occupants.items() if not occupant.is_draining}
        return GpuSlot(self.key, self.reading, active, self.members)

    def attribute(self, processes: Sequence[GpuProcess]) -> dict[str, tuple[ProcessId, ...]]:
        """The processes of each occupant: its holder, descendants of the holder, and processes that were the lease's
        before (a process whose parent died keeps its lease). The nearest ancestor decides. Of leases with the same
        holder, active ones come before draining ones.
        """
        if not processes:
            return dict.fromkeys(self.occupants, ())
        roots = by_pid((lease_id, self._roots(lease_id)) for lease_id in self.occupants)
        members: dict[str, list[ProcessId]] = {lease_id: [] for lease_id in self.occupants}
        for process in processes:
            for owner in self._nearest(process, roots):
                members[owner].append(process.id)
        return {lease_id: tuple(found) for lease_id, found in members.items()}

    def _roots(self, lease_id: str) -> tuple[ProcessId, ...]:
        holder, members = self.occupants[lease_id].process, self.members.get(lease_id, ())
        return members if holder is None else (*members, holder)

    def _nearest(self, process: GpuProcess, roots: ByPid) -> list[str]:
        for link in (process.id, *process.ancestors):
            owners = leases_of(link, roots)
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


def memory_use(slot: GpuSlot, ignored_processes: Collection[str]) -> MemoryUse | None:
    """Split the used memory between leases and outside use; None if it is unknown how much is used.

    Memory may have no known owner: there is no process list, or a process does not report its memory. Then it counts
    for the leases in question up to what they asked for, and only the rest counts as outside use.
    """
    reading = slot.reading
    if reading is None or reading.memory_used_mb is None:
        return None
    unexplained_mb = reading.memory_used_mb
    observed_mb: dict[str, float] = {}
    # Leases whose processes cannot all be measured may own part of the memory without an owner.
    unweighed: set[str] = set()
    members = by_pid(slot.members.items())
    for process in reading.processes or ():
        owners = [owner for owner in leases_of(process.id, members) if owner in slot.occupants]
        if process.memory_mb is None:
            unweighed.update(owners)
        elif owners:
            _share_out(process.memory_mb, owners, slot.occupants, observed_mb)
            unexplained_mb -= process.memory_mb
        elif process.name in ignored_processes:
            unexplained_mb -= process.memory_mb
    by_lease: dict[str, float] = {}
    for lease_id, occupant in slot.occupants.items():
        seen_mb = observed_mb.get(lease_id, 0.0)
        own_mb = max(occupant.asked_mb or 0.0, seen_mb)
        is_known = reading.processes is not None and lease_id not in unweighed and not _is_unknown(slot, lease_id)
        if reading.at > occupant.since and not is_known:
            free_mb = max(unexplained_mb, 0.0)
            if occupant.asked_mb is None:
                # An exclusive lease owns all memory that has no other owner.
                own_mb += free_mb
                unexplained_mb = 0.0
            else:
                unexplained_mb -= min(free_mb, own_mb - seen_mb)
        by_lease[lease_id] = own_mb
    return MemoryUse(by_lease, max(unexplained_mb, 0.0))


def _share_out(
    memory_mb: float, owners: Sequence[str], occupants: Mapping[str, Occupant], observed_mb: dict[str, float]
) -> None:
    """Assign memory to its owners: to each up to what it asked for, and the rest to the first."""
    for owner in owners:
        part_mb = min(memory_mb, max((occupants[owner].asked_mb or 0.0) - observed_mb.get(owner, 0.0), 0.0))
        observed_mb[owner] = observed_mb.get(owner, 0.0) + part_mb
        memory_mb -= part_mb
    observed_mb[owners[0]] += memory_mb


def used_percent(slot: GpuSlot, ignored_processes: Collection[str]) -> float | None:
    """Measured memory in percent, without that of ignored processes; None if unknown."""
    reading = slot.reading
    if reading is None:
        return None
    used_mb = reading.memory_used_mb
    if not ignored_processes or reading.processes is None or used_mb is None or not reading.memory_total_mb:
        return reading.memory_percent
    ignored_mb = sum(p.memory_mb or 0.0 for p in reading.processes if p.name in ignored_processes)
    return 100.0 * max(used_mb - ignored_mb, 0.0) / reading.memory_total_mb


def is_used_by_leases_only(slot: GpuSlot, ignored_processes: Collection[str]) -> bool:
    """Whether every process on it belongs to a lease or is ignored."""
    processes = slot.reading.processes if slot.reading else None
    if not slot.occupants or processes is None:
        return False
    members = by_pid(slot.members.items())
    return all(leases_of(p.id, members) or p.name in ignored_processes for p in processes)


def read_without(reading: Reading, own: Collection[ProcessId], utilization_percent: float | None) -> Reading:
    """What would be read of a GPU if these processes had left it, with this load."""
    processes, used_mb = reading.processes or (), reading.memory_used_mb
    own_mb = sum(process.memory_mb or 0.0 for process in processes if process.id in own)
    return replace(
        reading,
        processes=reading.processes and tuple(process for process in processes if process.id not in own),
        memory_used_mb=None if used_mb is None else max(used_mb - own_mb, 0.0),
        utilization_percent=utilization_percent,
    )


@dataclass(frozen=True, slots=True)
class ProcessOwnership:
    """The leases of a process. `is_outside`: it has none; None if the processes of some lease there are unknown."""

    lease_ids: tuple[str, ...]
    is_outside: bool | None
    is_ignored: bool


def attribute_processes(slot: GpuSlot, ignored_processes: Collection[str]) -> list[tuple[GpuProcess, ProcessOwnership]]:
    """All processes on a GPU, each with its ownership, by the same rules as `memory_use`."""
    processes = slot.reading.processes if slot.reading else None
    if not processes:
        return []
    is_any_unknown = any(_is_unknown(slot, lease_id) for lease_id in slot.occupants)
    members = by_pid(slot.members.items())
    found = []
    for process in processes:
        owners, is_ignored = tuple(leases_of(process.id, members)), process.name in ignored_processes
        is_outside = None if is_any_unknown and not owners and not is_ignored else not owners
        found.append((process, ProcessOwnership(owners, is_outside, is_ignored)))
    return found


def _is_unknown(slot: GpuSlot, lease_id: str) -> bool:
    return slot.occupants[lease_id].process is None and lease_id not in slot.members


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


def outside_use(slot: GpuSlot, settings: PoolSettings, ignored_processes: Collection[str]) -> OutsideUse | None:
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
