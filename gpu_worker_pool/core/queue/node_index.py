"""What the sorted lists of a pool know of the GPUs of one node (see capacity.py)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
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


# A pool has GPUs of few classes, and every change of a GPU asks for some of these groups.
group_of = lru_cache(maxsize=1024)(Group)
class_of = lru_cache(maxsize=1024)(GpuClass)

# An entry begins with the sort key and ends with a GpuKey or a node name. It has all that a verdict depends on except
# the time, so equal entries mean equal verdicts.
Entry = tuple[Any, ...]
BY_NODE = (Use.EXCLUSIVE, Use.WHOLE, Use.NODES_EXCLUSIVE, Use.NODES_SHARED)
Lists = dict[Use, dict[Group, list[Entry]]]
ListKey = tuple[Use, Group]
# What a GPU or a node has in sorted lists: one entry in each of these.
Listed = dict[ListKey, Entry]
# The entry that a list loses, and the one that it gains in its place.
Move = tuple[ListKey, Entry | None, Entry | None]


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

    def entries(self, key: GpuKey) -> Listed:
        """Its entries in the lists of its node."""
        found: Listed = {}
        if self.gpu_class is None:
            return found
        if self.is_open_to_exclusive and self.percent is not None:
            use = (self.percent + self.load_percent, self.gpu_index, self.percent, self.is_in_use_outside, key)
            found[Use.EXCLUSIVE, group_of(self.gpu_class, self.is_clear_to_exclusive)] = use
        if self.is_open_to_shared and self.committed_mb is not None:
            commitment = (-self.committed_mb, self.gpu_index, self.load_percent, self.is_used_by_leases_only, key)
            list_of = Use.WHOLE if self.is_open_to_exclusive else Use.SHARED  # open to both: no lease is on it
            found[list_of, group_of(self.gpu_class, self.is_clear_to_shared)] = commitment
        return found


def no_lists() -> Lists:
    return {use: {} for use in Use}


@dataclass(slots=True)
class OpenGpus:
    """The GPUs of a node that admit one more lease of a kind, by index. `names` counts them by name, and by whether they are clear."""

    places: list[tuple[float, GpuKey]] = field(default_factory=list)
    names: dict[tuple[str, bool], int] = field(default_factory=dict)

    def add(self, place: tuple[float, GpuKey], name: tuple[str, bool]) -> None:
        insort(self.places, place)
        self.names[name] = self.names.get(name, 0) + 1

    def remove(self, place: tuple[float, GpuKey], name: tuple[str, bool]) -> None:
        del self.places[bisect_left(self.places, place)]
        self.names[name] -= 1
        if not self.names[name]:
            del self.names[name]

    def listed(self, use: Use, node: str) -> Listed:
        """How many GPUs the node has: those that are clear, and all."""
        found: Listed = {}
        for is_clear in (True, False):
            counts = {name: number for name, number in self.names.items() if name[1] or not is_clear}
            if counts:
                group = group_of(frozenset([name for name, _ in counts]), is_clear)
                found[use, group] = (sum(counts.values()), node)
        return found


@dataclass(slots=True)
class NodeIndex:
    """The GPUs of one node, in sorted lists of its own. What changes on a GPU changes its own entries only. `listed` are the entries
    of the node in the lists by node of the pool.
    """

    node: str
    facts: dict[GpuKey, SlotFacts] = field(default_factory=dict)
    entries: dict[GpuKey, Listed] = field(default_factory=dict)
    lists: Lists = field(default_factory=no_lists)
    open_to_exclusive: OpenGpus = field(default_factory=OpenGpus)
    open_to_shared: OpenGpus = field(default_factory=OpenGpus)
    makeup: Makeup = ()
    makeup_in_service: Makeup = ()
    listed: dict[Use, Listed] = field(default_factory=lambda: {use: {} for use in BY_NODE})
    _has_old_makeup: bool = False

    def replace(self, key: GpuKey, found: SlotFacts | None) -> list[Move]:
        """Take in what is known of a GPU now; None if it is gone. Return what that changes in the lists of the node."""
        known = self.facts.get(key)
        after = {} if found is None else found.entries(key)
        moves = moves_between(self.entries.get(key, {}), after)
        move_entries(self.lists, moves)
        self._count(key, known, OpenGpus.remove)
        self._count(key, found, OpenGpus.add)
        if found is None:
            self.facts.pop(key, None)
            self.entries.pop(key, None)
        else:
            self.facts[key], self.entries[key] = found, after
        if (
            known is None
            or found is None
            or (known.gpu_class, known.is_ours, known.is_in_service)
            != (found.gpu_class, found.is_ours, found.is_in_service)
        ):
            self._has_old_makeup = True
        return moves

    def _count(
        self,
        key: GpuKey,
        facts: SlotFacts | None,
        change: Callable[[OpenGpus, tuple[float, GpuKey], tuple[str, bool]], None],
    ) -> None:
        """Add a GPU with these facts to those that are open, or remove it."""
        if facts is None or facts.gpu_class is None:
            return
        place, name = (facts.gpu_index, key), facts.gpu_class.name
        if facts.is_open_to_exclusive:
            change(self.open_to_exclusive, place, (name, facts.is_clear_to_exclusive))
        if facts.is_open_to_shared:
            change(self.open_to_shared, place, (name, facts.is_clear_to_shared))

    def count_again(self) -> None:
        """Derive the makeup, if that of a GPU has changed."""
        if self._has_old_makeup:
            self.makeup = makeup_of(found.gpu_class for found in self.facts.values() if found.is_ours)
            self.makeup_in_service = makeup_of(found.gpu_class for found in self.facts.values() if found.is_in_service)
            self._has_old_makeup = False

    def list_again(self, use: Use) -> list[Move]:
        """Derive what the pool knows of it. Return what that changes in these lists of the pool."""
        before, after = self.listed[use], self.derive(use)
        self.listed[use] = after
        return moves_between(before, after)

    def derive(self, use: Use) -> Listed:
        """How many of its GPUs are open, or how its own lists begin."""
        if use is Use.NODES_EXCLUSIVE:
            return self.open_to_exclusive.listed(use, self.node)
        if use is Use.NODES_SHARED:
            return self.open_to_shared.listed(use, self.node)
        open_gpus = len(self.open_to_exclusive.places)
        return {(use, group): (entries[0][0], open_gpus, self.node) for group, entries in self.lists[use].items()}

    def entries_from(self, use: Use, group: Group, least: float) -> Iterator[Entry]:
        """The entries of one of its lists from this value on, as in the pool."""
        entries = self.lists[use].get(group, [])
        first = 0 if least == -inf else bisect_left(entries, (least,))
        return self.in_pool(use, islice(entries, first, None))

    def in_pool(self, use: Use, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Entries as they are sorted among those of other nodes: of equals, on the node with the fewest open GPUs."""
        open_gpus = 0 if use is Use.SHARED else len(self.open_to_exclusive.places)
        for entry in entries:
            yield (entry[0], open_gpus, self.node, *entry[1:])


def moves_between(before: Listed, after: Listed) -> list[Move]:
    moves: list[Move] = []
    for key, gained in after.items():
        lost = before.get(key)
        if lost != gained:
            moves.append((key, lost, gained))
    for key, lost in before.items():
        if key not in after:
            moves.append((key, lost, None))
    return moves


def move_entries(lists: Lists, moves: Iterable[Move]) -> None:
    for (use, group), lost, gained in moves:
        entries = lists[use].setdefault(group, [])
        if lost is not None:
            del entries[bisect_left(entries, lost)]
        if gained is not None:
            insort(entries, gained)
        elif not entries:
            del lists[use][group]


def facts_of(
    slot: GpuSlot, settings: PoolSettings, excluded: Mapping[GpuKey, str], ignored_processes: AbstractSet[str]
) -> SlotFacts:
    reading = slot.reading
    if reading is None:
        installed = slot.installed
        if installed is None:
            return SlotFacts(inf, None)
        return SlotFacts(installed.index, class_of(installed.name, installed.memory_total_mb))
    gpu_class = class_of(reading.gpu.name, reading.memory_total_mb)
    if reading.other_server is not None:
        return SlotFacts(reading.gpu.index, gpu_class, is_ours=not reading.is_other_server_up)
    load_percent, percent = reading.load_percent, used_percent(slot, ignored_processes)
    is_measured = reading.fault is None and load_percent is not None and percent is not None
    if not is_measured or load_percent is None or slot.key in excluded:
        return SlotFacts(reading.gpu.index, gpu_class)
    is_open_to_shared = is_open_to_exclusive = not slot.occupants
    if slot.occupants:
        workers_per_gpu, max_sharers = settings.workers_per_gpu, settings.max_sharers
        is_open_to_shared = slot.is_open_for(shared=True, workers_per_gpu=workers_per_gpu, max_sharers=max_sharers)
        is_open_to_exclusive = slot.is_open_for(shared=False, workers_per_gpu=workers_per_gpu, max_sharers=max_sharers)
    if not is_open_to_shared and not is_open_to_exclusive:
        # It is in no list until a lease ends, whatever is read of it.
        return SlotFacts(reading.gpu.index, gpu_class, is_open_to_exclusive, is_open_to_shared)
    use = memory_use(slot, ignored_processes) if is_open_to_shared else None
    outside = None if settings.outsiders == "thresholds" else outside_use(slot, settings, ignored_processes)
    limits = settings.thresholds
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
