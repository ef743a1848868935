"""What the sorted lists of a pool know of the GPUs of one node (see capacity.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, NamedTuple

from gpu_worker_pool.core.model.gpu import GpuKey, ProcessId
from gpu_worker_pool.core.model.outsiders import outside_use
from gpu_worker_pool.core.model.request import matches_model
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.slot import GpuSlot, is_used_by_leases_only, memory_use, used_percent


class GpuClass(NamedTuple):
    name: str
    total_mb: float | None


# How many GPUs of each class there are.
Makeup = tuple[tuple[GpuClass, int], ...]


class Use(Enum):
    EXCLUSIVE = "GPUs open to an exclusive lease, least used first, then on the node with the fewest open"
    SHARED = "GPUs that are shared and open to one more, most committed first"
    WHOLE = "GPUs without a lease and open to a shared one, most committed first, then on the node with the fewest open"
    NODES_EXCLUSIVE = "nodes by how many GPUs are open to an exclusive lease"
    NODES_SHARED = "nodes by how many GPUs are open to a shared lease"


class Group(NamedTuple):
    """The GPUs of a sorted list: those of a class, or nodes with GPUs of these names.

    `is_clear` lists have only GPUs below the pool's own thresholds and, for exclusive leases, without use that keeps
    them from one. The others are in use from outside the pool, and few requests need them. For nodes, lists that are not clear count all GPUs.
    """

    of: GpuClass | frozenset[str]
    is_clear: bool

    def has_model(self, pattern: str | None) -> bool:
        if pattern is None:
            return True
        names = (self.of.name,) if isinstance(self.of, GpuClass) else self.of
        return any(matches_model(pattern, name) for name in names)


# An entry begins with the sort key and ends with a GpuKey or a node name. It has all that a verdict depends on except
# the time, so equal entries mean equal verdicts.
Entry = tuple[Any, ...]
# An entry, and the list that it is in.
Listed = tuple[Use, Group, Entry]


class SlotFacts(NamedTuple):
    """What the lists know of one GPU. `gpu_class` is None if there is no reading. `is_open_to_...` says whether the
    occupants admit one more lease; it is None if the GPU is out of service or cannot be measured.
    """

    gpu_index: float
    gpu_class: GpuClass | None
    is_open_to_exclusive: bool | None = None
    is_open_to_shared: bool | None = None
    percent: float | None = None
    load_percent: float = 0.0
    committed_mb: float | None = None
    is_used_by_leases_only: bool = False
    is_in_use_outside: bool = False
    is_clear_to_exclusive: bool = False
    is_clear_to_shared: bool = False
    # Of a GPU that only processes outside the pool use: the processes that all of those are, or descend from.
    outside_roots: frozenset[ProcessId] = frozenset()
    # False if another server has it.
    is_ours: bool = True

    @property
    def is_in_service(self) -> bool:
        return self.is_open_to_exclusive is not None

    @property
    def is_whole(self) -> bool:
        """Whether no lease is on it."""
        return bool(self.is_open_to_exclusive and self.is_open_to_shared)

    @property
    def shape(self) -> tuple[object, ...]:
        """What the node's counts, and the entries of its other GPUs, depend on."""
        return (
            self.gpu_index,
            self.gpu_class,
            self.is_open_to_exclusive,
            self.is_open_to_shared,
            self.is_clear_to_exclusive,
            self.is_clear_to_shared,
            self.is_ours,
        )

    def entries(self, key: GpuKey, open_on_node: int) -> Iterator[Listed]:
        """Its entries in the lists. `open_on_node` is the number of GPUs on its node that are open to exclusive leases."""
        if self.gpu_class is None:
            return
        if self.is_open_to_exclusive and self.percent is not None:
            score = self.percent + self.load_percent
            use = (score, open_on_node, key.node, self.gpu_index, self.percent, self.is_in_use_outside, key)
            yield Use.EXCLUSIVE, Group(self.gpu_class, self.is_clear_to_exclusive), use
        if self.is_open_to_shared and self.committed_mb is not None:
            list_of, fewest = (Use.WHOLE, open_on_node) if self.is_whole else (Use.SHARED, 0)
            rest = (self.gpu_index, self.load_percent, self.is_used_by_leases_only, key)
            commitment = (-self.committed_mb, fewest, key.node, *rest)
            yield list_of, Group(self.gpu_class, self.is_clear_to_shared), commitment


@dataclass(slots=True)
class NodeIndex:
    """The GPUs of one node in the lists. It follows from `facts`, and `derive` makes it; `update` gives the same."""

    facts: dict[GpuKey, SlotFacts] = field(default_factory=dict)
    open_to_exclusive: list[GpuSlot] = field(default_factory=list)
    open_to_shared: list[GpuSlot] = field(default_factory=list)
    entries: set[Listed] = field(default_factory=set)
    indexed: tuple[tuple[float, GpuKey], ...] = ()
    makeup: Makeup = ()
    makeup_in_service: Makeup = ()

    @classmethod
    def derive(cls, node: str, facts: dict[GpuKey, SlotFacts], slots: Mapping[GpuKey, GpuSlot]) -> NodeIndex:
        ordered = sorted(facts.items(), key=lambda item: (item[1].gpu_index, item[0]))
        exclusive = [(key, found) for key, found in ordered if found.is_open_to_exclusive]
        shared = [(key, found) for key, found in ordered if found.is_open_to_shared]
        index = cls(
            facts,
            open_to_exclusive=[slots[key] for key, _ in exclusive],
            open_to_shared=[slots[key] for key, _ in shared],
            makeup=makeup_of(found.gpu_class for _, found in ordered if found.gpu_class and found.is_ours),
            makeup_in_service=makeup_of(
                found.gpu_class for _, found in ordered if found.gpu_class and found.is_in_service
            ),
            indexed=tuple((found.gpu_index, key) for key, found in ordered if found.gpu_class),
        )
        for key, found in ordered:
            index.entries.update(found.entries(key, len(exclusive)))
        for use_of_node, is_clear, counted in (
            (Use.NODES_EXCLUSIVE, True, [found for _, found in exclusive if found.is_clear_to_exclusive]),
            (Use.NODES_EXCLUSIVE, False, [found for _, found in exclusive]),
            (Use.NODES_SHARED, True, [found for _, found in shared if found.is_clear_to_shared]),
            (Use.NODES_SHARED, False, [found for _, found in shared]),
        ):
            if counted:
                names = frozenset(found.gpu_class.name for found in counted if found.gpu_class)
                index.entries.add((use_of_node, Group(names, is_clear), (len(counted), node)))
        return index

    def keeps_shape(self, changes: Mapping[GpuKey, SlotFacts | None]) -> bool:
        """Whether these changes concern no entries except those of the GPUs themselves."""
        return all(
            found is not None and key in self.facts and found.shape == self.facts[key].shape
            for key, found in changes.items()
        )

    def update(self, changes: Mapping[GpuKey, SlotFacts | None]) -> tuple[set[Listed], set[Listed]]:
        """Take in changes that keep the shape; return the entries that it lost, and those that it gained."""
        lost: set[Listed] = set()
        gained: set[Listed] = set()
        for key, found in changes.items():
            if found is not None:
                lost.update(self.facts[key].entries(key, len(self.open_to_exclusive)))
                gained.update(found.entries(key, len(self.open_to_exclusive)))
                self.facts[key] = found
        lost, gained = lost - gained, gained - lost
        self.entries -= lost
        self.entries |= gained
        return lost, gained


def facts_of(
    slot: GpuSlot, settings: PoolSettings, excluded: Mapping[GpuKey, str], ignored_processes: AbstractSet[str]
) -> SlotFacts:
    reading = slot.reading
    if reading is None:
        installed = slot.installed
        if installed is None:
            return SlotFacts(inf, None)
        return SlotFacts(installed.index, GpuClass(installed.name, installed.memory_total_mb))
    gpu_class = GpuClass(reading.gpu.name, reading.memory_total_mb)
    if reading.other_server is not None:
        return SlotFacts(reading.gpu.index, gpu_class, is_ours=not reading.is_other_server_up)
    load_percent = reading.load_percent
    is_measured = reading.fault is None and load_percent is not None and reading.memory_percent is not None
    if not is_measured or load_percent is None or slot.key in excluded:
        return SlotFacts(reading.gpu.index, gpu_class)
    bounds = {"workers_per_gpu": settings.workers_per_gpu, "max_sharers": settings.max_sharers}
    is_open_to_shared = slot.is_open_for(shared=True, **bounds)
    use = memory_use(slot, ignored_processes) if is_open_to_shared else None
    outside = None if settings.outsiders == "thresholds" else outside_use(slot, settings, ignored_processes)
    is_open_to_exclusive = slot.is_open_for(shared=False, **bounds)
    percent, limits = used_percent(slot, ignored_processes), settings.thresholds
    is_below = percent is not None and percent < limits.memory_percent and load_percent < limits.utilization_percent
    is_ours_only = is_open_to_shared and is_used_by_leases_only(slot, ignored_processes)
    is_light = is_ours_only or load_percent < limits.utilization_percent
    return SlotFacts(
        reading.gpu.index,
        gpu_class,
        is_open_to_exclusive,
        is_open_to_shared,
        percent,
        load_percent,
        use.committed_mb if use else None,
        is_ours_only,
        outside is not None,
        is_open_to_exclusive and is_below and outside is None,
        use is not None and is_light,
        outside.roots if outside and not slot.occupants else frozenset(),
    )


def makeup_of(classes: Iterable[GpuClass]) -> Makeup:
    return tuple(sorted(Counter(classes).items(), key=_by_name))


def _by_name(counted: tuple[GpuClass, int]) -> tuple[str, float]:
    (name, total_mb), _ = counted
    return (name, -1.0 if total_mb is None else total_mb)
