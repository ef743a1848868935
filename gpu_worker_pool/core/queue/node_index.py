"""What the sorted lists of a pool know of the GPUs of one node (see capacity.py)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
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


class Use(StrEnum):
    """What a sorted list has. Of a list by node, the pool knows only where that of each node begins."""

    EXCLUSIVE = "by node, GPUs open to an exclusive lease, least used first"
    SHARED = "GPUs that are shared and open to one more, most committed first"
    WHOLE = "by node, GPUs without a lease and open to a shared one, most committed first"
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
    def service(self) -> tuple[object, ...]:
        """What the makeup of its node depends on."""
        return (self.gpu_class, self.is_ours, self.is_in_service)

    def entries(self, key: GpuKey) -> Iterator[Listed]:
        """Its entries in the lists of its node."""
        if self.gpu_class is None:
            return
        if self.is_open_to_exclusive and self.percent is not None:
            use = (self.percent + self.load_percent, self.gpu_index, self.percent, self.is_in_use_outside, key)
            yield Use.EXCLUSIVE, Group(self.gpu_class, self.is_clear_to_exclusive), use
        if self.is_open_to_shared and self.committed_mb is not None:
            commitment = (-self.committed_mb, self.gpu_index, self.load_percent, self.is_used_by_leases_only, key)
            list_of = Use.WHOLE if self.is_whole else Use.SHARED
            yield list_of, Group(self.gpu_class, self.is_clear_to_shared), commitment


@dataclass(slots=True)
class NodeIndex:
    """The GPUs of one node, in sorted lists of its own. What changes on a GPU changes its own entries only.

    `open_names` are the names of the GPUs that are open to a kind of lease, each as often as there are such GPUs: those that are clear,
    and all.
    """

    node: str
    facts: dict[GpuKey, SlotFacts] = field(default_factory=dict)
    lists: dict[tuple[Use, Group], list[Entry]] = field(default_factory=dict)
    open_to_exclusive: list[tuple[float, GpuKey]] = field(default_factory=list)
    open_to_shared: list[tuple[float, GpuKey]] = field(default_factory=list)
    open_names: defaultdict[tuple[Use, bool], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    makeup: Makeup = ()
    makeup_in_service: Makeup = ()
    listed: frozenset[Listed] = frozenset()
    _has_old_makeup: bool = False

    def replace(self, key: GpuKey, found: SlotFacts | None) -> tuple[set[Listed], set[Listed]]:
        """Take in what is known of a GPU now; None if it is gone. Return the entries that it lost, and those it gained."""
        known = self.facts.get(key)
        before = set() if known is None else set(known.entries(key))
        after = set() if found is None else set(found.entries(key))
        for use, group, entry in before - after:
            drop_sorted(self.lists, (use, group), entry)
        for use, group, entry in after - before:
            insort(self.lists.setdefault((use, group), []), entry)
        if known is not None:
            self._count(key, known, -1)
        if found is None:
            self.facts.pop(key, None)
        else:
            self.facts[key] = found
            self._count(key, found, 1)
        self._has_old_makeup |= (known and known.service) != (found and found.service)
        return before - after, after - before

    def _count(self, key: GpuKey, facts: SlotFacts, number: int) -> None:
        for is_open, is_clear, use, places in (
            (facts.is_open_to_exclusive, facts.is_clear_to_exclusive, Use.NODES_EXCLUSIVE, self.open_to_exclusive),
            (facts.is_open_to_shared, facts.is_clear_to_shared, Use.NODES_SHARED, self.open_to_shared),
        ):
            if not is_open or facts.gpu_class is None:
                continue
            if number > 0:
                insort(places, (facts.gpu_index, key))
            else:
                del places[bisect_left(places, (facts.gpu_index, key))]
            for of_clear in (True, False) if is_clear else (False,):
                names = self.open_names[use, of_clear]
                names[facts.gpu_class.name] += number
                if not names[facts.gpu_class.name]:
                    del names[facts.gpu_class.name]
                if not names:
                    del self.open_names[use, of_clear]

    def list_again(self) -> tuple[AbstractSet[Listed], AbstractSet[Listed]]:
        """Derive what the pool knows of it. Return the entries in the lists of the pool that it lost, and those it gained."""
        if self._has_old_makeup:
            self.makeup = makeup_of(found.gpu_class for found in self.facts.values() if found.is_ours)
            self.makeup_in_service = makeup_of(found.gpu_class for found in self.facts.values() if found.is_in_service)
            self._has_old_makeup = False
        before = self.listed
        self.listed = frozenset(self._listed())
        return before - self.listed, self.listed - before

    def _listed(self) -> Iterator[Listed]:
        """How many of its GPUs are open, and how its own lists begin."""
        for (use, is_clear), names in self.open_names.items():
            yield use, Group(frozenset(names), is_clear), (sum(names.values()), self.node)
        for (use, group), entries in self.lists.items():
            if use is not Use.SHARED:
                yield use, group, (entries[0][0], len(self.open_to_exclusive), self.node)

    def groups(self, use: Use) -> list[Group]:
        return [group for listed_use, group in self.lists if listed_use is use]

    def entries_from(self, use: Use, group: Group, least: float) -> Iterator[Entry]:
        """The entries of one of its lists from this value on, as in the pool."""
        entries = self.lists.get((use, group), [])
        return (self.in_pool(use, entry) for entry in islice(entries, bisect_left(entries, (least,)), None))

    def in_pool(self, use: Use, entry: Entry) -> Entry:
        """An entry as it is sorted among those of other nodes: of equals, on the node with the fewest open GPUs."""
        value, *rest = entry
        return (value, 0 if use is Use.SHARED else len(self.open_to_exclusive), self.node, *rest)


def drop_sorted(lists: dict[Any, list[Entry]], of: object, entry: Entry) -> None:
    """Remove an entry from one of these sorted lists, and the list if it was the last."""
    entries = lists[of]
    del entries[bisect_left(entries, entry)]
    if not entries:
        del lists[of]


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
    workers_per_gpu, max_sharers = settings.workers_per_gpu, settings.max_sharers
    is_open_to_shared = slot.is_open_for(shared=True, workers_per_gpu=workers_per_gpu, max_sharers=max_sharers)
    is_open_to_exclusive = slot.is_open_for(shared=False, workers_per_gpu=workers_per_gpu, max_sharers=max_sharers)
    if not is_open_to_shared and not is_open_to_exclusive:
        # It is in no list until a lease ends, whatever is read of it.
        return SlotFacts(reading.gpu.index, gpu_class, is_open_to_exclusive, is_open_to_shared)
    use = memory_use(slot, ignored_processes) if is_open_to_shared else None
    outside = None if settings.outsiders == "thresholds" else outside_use(slot, settings, ignored_processes)
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


def makeup_of(classes: Iterable[GpuClass | None]) -> Makeup:
    known = Counter(gpu_class for gpu_class in classes if gpu_class is not None)
    return tuple(sorted(known.items(), key=_by_name))


def _by_name(counted: tuple[GpuClass, int]) -> tuple[str, float]:
    (name, total_mb), _ = counted
    return (name, -1.0 if total_mb is None else total_mb)
