"""What the pool knows of one GPU, and which lease its memory belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any

from .gpu import Gpu, GpuKey, GpuProcess, InventoryGpu, ProcessId, Reading


@dataclass(frozen=True, slots=True)
class Occupant:
    """A lease on a GPU. `asked_mb` is None if it is exclusive. Memory of the holder's `process` is the lease's. `since` is
    when it was granted: memory that was read before is not its own.
    """

    asked_mb: float | None
    process: ProcessId | None = None
    is_draining: bool = False
    since: float = field(default=-inf, compare=False)


class Occupants(dict[str, Occupant]):
    """The leases on a GPU, in the order of their grants. It counts what every decision asks, so that no decision goes
    through all of them. `changes` counts changes other than a new lease at the end.
    """

    changes = 0
    sharing = 0
    draining = 0

    def __init__(self, occupants: Mapping[str, Occupant] | None = None) -> None:
        super().__init__()
        for lease_id, occupant in (occupants or {}).items():
            self[lease_id] = occupant

    def __setitem__(self, lease_id: str, occupant: Occupant) -> None:
        if (was := self.get(lease_id)) is not None:
            self.changes += 1
            self._count(was, -1)
        self._count(occupant, 1)
        super().__setitem__(lease_id, occupant)

    def __delitem__(self, lease_id: str) -> None:
        self.changes += 1
        self._count(self[lease_id], -1)
        super().__delitem__(lease_id)

    def _count(self, occupant: Occupant, number: int) -> None:
        if occupant.asked_mb is not None:
            self.sharing += number
        if occupant.is_draining:
            self.draining += number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


class Members(dict[str, tuple[ProcessId, ...]]):
    """The processes of each lease on a GPU, and the leases of each process."""

    changes = 0
    _by_pid: dict[int, list[tuple[ProcessId, str]]] | None = None

    def __setitem__(self, lease_id: str, processes: tuple[ProcessId, ...]) -> None:
        self._change()
        super().__setitem__(lease_id, processes)

    def pop(self, lease_id: str, *default: Any) -> Any:
        if lease_id in self:
            self._change()
        return super().pop(lease_id, *default)

    def owners(self, process: ProcessId) -> list[str]:
        """The leases that this process belongs to."""
        if self._by_pid is None:
            self._by_pid = by_pid(self.items())
        return leases_of(process, self._by_pid)

    def _change(self) -> None:
        self.changes += 1
        self._by_pid = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def by_pid(processes: Iterable[tuple[str, Iterable[ProcessId]]]) -> dict[int, list[tuple[ProcessId, str]]]:
    found: dict[int, list[tuple[ProcessId, str]]] = {}
    for lease_id, own in processes:
        for process in own:
            found.setdefault(process.pid, []).append((process, lease_id))
    return found


def leases_of(process: ProcessId, processes: Mapping[int, Sequence[tuple[ProcessId, str]]]) -> list[str]:
    found = processes.get(process.pid)
    return list(dict.fromkeys(lease_id for known, lease_id in found if process.is_same(known))) if found else []


@dataclass(slots=True)
class GpuSlot:
    """One GPU in the pool. `occupants` are the leases on it, active or draining, in the order of their grants. `members`
    are the processes that were seen to belong to each of them.
    """

    key: GpuKey
    reading: Reading | None = None
    occupants: Occupants = field(default_factory=Occupants)
    members: Members = field(default_factory=Members)
    # As the inventory of its node has it.
    installed: InventoryGpu | None = None
    # When it was last seen to compute, or was granted; None if that is unknown.
    busy: float | None = None
    # The last sums of its memory; a new lease is only added to them.
    memory_sums: _MemorySums | None = field(default=None, compare=False, repr=False)

    @property
    def gpu(self) -> Gpu | None:
        """As it was read last, else as the inventory has it; None if it is known by its leases only."""
        if self.reading is not None:
            return self.reading.gpu
        return None if self.installed is None else Gpu(self.key, self.installed.index, self.installed.name)

    @property
    def is_shared(self) -> bool:
        return self.occupants.sharing > 0

    def is_read_as(self, reading: Reading) -> bool:
        """Whether a newer reading says of the GPU and its leases what the last one did."""
        known = self.reading
        return (
            known is not None
            and known.findings == reading.findings
            # Memory that was read before a grant is not the lease's.
            and all(known.at > occupant.since for occupant in self.occupants.values())
        )

    def is_open_for(self, *, shared: bool, workers_per_gpu: int, max_sharers: int) -> bool:
        """Whether its occupants admit one more lease of this kind. Thresholds and memory are judged elsewhere."""
        if not self.occupants:
            return True
        if self.occupants.draining:
            return False
        if shared:
            return self.is_shared and len(self.occupants) < max_sharers
        return not self.is_shared and len(self.occupants) < workers_per_gpu

    def without_draining(self) -> GpuSlot:
        active = {lease_id: occupant for lease_id, occupant in self.occupants.items() if not occupant.is_draining}
        return GpuSlot(self.key, self.reading, Occupants(active), self.members)

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

    def _nearest(self, process: GpuProcess, roots: Mapping[int, Sequence[tuple[ProcessId, str]]]) -> list[str]:
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
    # The sum of `by_lease`, if it is known already.
    leased_mb: float | None = field(default=None, compare=False, repr=False)

    @property
    def committed_mb(self) -> float:
        return (sum(self.by_lease.values()) if self.leased_mb is None else self.leased_mb) + self.outside_mb


class _MemorySums:
    """The memory of a GPU as of one reading, lease by lease in the order of their grants. A lease that comes is added to
    it; after any other change it is made again. Both ways give the same sums, to the last bit.
    """

    def __init__(self, slot: GpuSlot, reading: Reading, used_mb: float, ignored_processes: AbstractSet[str]) -> None:
        self.reading = reading
        self.changes = (slot.occupants.changes, slot.members.changes)
        self.ignored = frozenset(ignored_processes)
        self.by_lease: dict[str, float] = {}
        self.leased_mb = 0.0
        self._observed_mb: dict[str, float] = {}
        self._unexplained_mb = used_mb
        # Leases whose processes cannot all be measured may own part of the memory without an owner.
        self._unweighed: set[str] = set()
        for process in reading.processes or ():
            owners = [owner for owner in slot.members.owners(process.id) if owner in slot.occupants]
            if process.memory_mb is None:
                self._unweighed.update(owners)
            elif owners:
                _share_out(process.memory_mb, owners, slot.occupants, self._observed_mb)
                self._unexplained_mb -= process.memory_mb
            elif process.name in ignored_processes:
                self._unexplained_mb -= process.memory_mb
        self.add_new(slot)

    def is_of(self, slot: GpuSlot, ignored_processes: AbstractSet[str]) -> bool:
        return (
            self.reading is slot.reading
            and self.changes == (slot.occupants.changes, slot.members.changes)
            and self.ignored == ignored_processes
        )

    def add_new(self, slot: GpuSlot) -> None:
        """Add the leases that came since."""
        new = list(islice(reversed(slot.occupants.items()), len(slot.occupants) - len(self.by_lease)))
        for lease_id, occupant in reversed(new):
            observed_mb = self._observed_mb.get(lease_id, 0.0)
            own_mb = max(occupant.asked_mb or 0.0, observed_mb)
            is_known = self.reading.processes is not None and lease_id not in self._unweighed
            if self.reading.at > occupant.since and (not is_known or _is_unknown(slot, lease_id)):
                free_mb = max(self._unexplained_mb, 0.0)
                if occupant.asked_mb is None:
                    # An exclusive lease owns all memory that has no other owner.
                    own_mb += free_mb
                    self._unexplained_mb = 0.0
                else:
                    self._unexplained_mb -= min(free_mb, own_mb - observed_mb)
            self.by_lease[lease_id] = own_mb
            self.leased_mb += own_mb

    def use(self) -> MemoryUse:
        return MemoryUse(self.by_lease, max(self._unexplained_mb, 0.0), self.leased_mb)


def memory_use(slot: GpuSlot, ignored_processes: AbstractSet[str]) -> MemoryUse | None:
    """Split the used memory between leases and outside use; None if it is unknown how much is used.

    Memory may have no known owner: there is no process list, or a process does not report its memory. Then it counts
    for the leases in question up to what they asked for, and only the rest counts as outside use. The caller must not
    keep the answer: a later grant adds to it.
    """
    reading = slot.reading
    if reading is None or reading.memory_used_mb is None:
        return None
    if not slot.occupants and not ignored_processes:
        return MemoryUse({}, max(reading.memory_used_mb, 0.0), 0.0)  # no lease and no ignored process has a part of it
    if slot.memory_sums is None or not slot.memory_sums.is_of(slot, ignored_processes):
        slot.memory_sums = _MemorySums(slot, reading, reading.memory_used_mb, ignored_processes)
    elif len(slot.memory_sums.by_lease) < len(slot.occupants):
        slot.memory_sums.add_new(slot)
    return slot.memory_sums.use()


def _share_out(
    memory_mb: float, owners: Sequence[str], occupants: Mapping[str, Occupant], observed_mb: dict[str, float]
) -> None:
    """Assign memory to its owners: to each up to what it asked for, and the rest to the first."""
    for owner in owners:
        part_mb = min(memory_mb, max((occupants[owner].asked_mb or 0.0) - observed_mb.get(owner, 0.0), 0.0))
        observed_mb[owner] = observed_mb.get(owner, 0.0) + part_mb
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
    return all(slot.members.owners(p.id) or p.name in ignored_processes for p in processes)


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
        owners, is_ignored = tuple(slot.members.owners(process.id)), process.name in ignored_processes
        is_outside = None if is_somebody_unknown and not owners and not is_ignored else not owners
        found.append((process, ProcessOwnership(owners, is_outside, is_ignored)))
    return found


def _is_unknown(slot: GpuSlot, lease_id: str) -> bool:
    return slot.occupants[lease_id].process is None and lease_id not in slot.members
