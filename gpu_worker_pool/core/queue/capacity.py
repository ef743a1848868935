"""Indexes over the GPUs of a pool, so that a decision considers only the GPUs that matter.

The indexes propose; every proposal is judged before it is granted (see eligibility.py). They must not leave out an
eligible GPU. They follow from the slots. A node is indexed again when an indexed fact about one of its GPUs changes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from heapq import merge
from itertools import islice
from math import inf
from typing import Any, NamedTuple

from gpu_worker_pool.core.model.gpu import GpuKey, ProcessId
from gpu_worker_pool.core.model.gpu_names import GpuNames
from gpu_worker_pool.core.model.outsiders import outside_use
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.model.settings import PoolSettings, Thresholds
from gpu_worker_pool.core.model.slot import GpuSlot, is_used_by_leases_only, memory_use, used_percent

# Sums of floats may differ in the last bits from those of `judge`, which decides such close cases.
ROUNDING_MB = 1e-3


class GpuClass(NamedTuple):
    name: str
    total_mb: float | None


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


@dataclass(slots=True)
class _NodeIndex:
    facts: dict[GpuKey, SlotFacts] = field(default_factory=dict)
    open_to_exclusive: list[GpuSlot] = field(default_factory=list)
    open_to_shared: list[GpuSlot] = field(default_factory=list)
    entries: set[tuple[Use, Group, Entry]] = field(default_factory=set)
    indexed: tuple[tuple[float, GpuKey], ...] = ()
    makeup: tuple[GpuClass, ...] = ()
    makeup_in_service: tuple[GpuClass, ...] = ()


class Capacity:
    """Finds GPUs by use, by committed memory and by name, and nodes by their number of open GPUs."""

    def __init__(self) -> None:
        self._nodes: dict[str, _NodeIndex] = {}
        self._lists: dict[Use, dict[Group, list[Entry]]] = {use: {} for use in Use}
        self._makeups: Counter[tuple[GpuClass, ...]] = Counter()
        self._names = GpuNames()
        # The GPUs that only one process outside the pool and its descendants use.
        self.used_outside_by: dict[ProcessId, set[GpuKey]] = {}

    def refresh(
        self,
        touched: AbstractSet[GpuKey],
        slots: Mapping[GpuKey, GpuSlot],
        settings: PoolSettings,
        excluded: Mapping[GpuKey, str],
        ignored_processes: AbstractSet[str],
    ) -> bool:
        """Update the indexes for these GPUs; one without a slot is dropped. Return whether it may affect a request."""
        changed: dict[str, dict[GpuKey, SlotFacts | None]] = {}
        for key in touched:
            slot, index = slots.get(key), self._nodes.get(key.node)
            facts = None if slot is None else _facts_of(slot, settings, excluded, ignored_processes)
            if facts != (index.facts.get(key) if index else None):
                changed.setdefault(key.node, {})[key] = facts
                self._note_roots(key, index.facts.get(key) if index else None, facts)
        matters = [self._reindex(node, changed[node], slots, settings) for node in sorted(changed)]
        return any(matters)

    def _reindex(
        self,
        node: str,
        changes: Mapping[GpuKey, SlotFacts | None],
        slots: Mapping[GpuKey, GpuSlot],
        settings: PoolSettings,
    ) -> bool:
        old = self._nodes.pop(node, None)
        known = {**(old.facts if old else {}), **changes}
        facts = {key: found for key, found in known.items() if found is not None}
        new = _index_node(node, facts, slots, settings)
        old_entries = old.entries if old else set()
        for use, group, entry in old_entries - new.entries:
            entries = self._lists[use][group]
            del entries[bisect_left(entries, entry)]
            if not entries:
                del self._lists[use][group]
        for use, group, entry in new.entries - old_entries:
            insort(self._lists[use].setdefault(group, []), entry)
        if old:
            self._makeups[old.makeup] -= 1
            if not self._makeups[old.makeup]:
                del self._makeups[old.makeup]
        if facts:
            self._nodes[node] = new
            self._makeups[new.makeup] += 1
        is_renamed = new.indexed != (old.indexed if old else ())
        if is_renamed:
            self._names.change(old.indexed if old else (), new.indexed)
        # If a name now means another GPU, or none, a request by that name could use other GPUs than before.
        return old is None or is_renamed or new.entries != old.entries or new.makeup_in_service != old.makeup_in_service

    def _note_roots(self, key: GpuKey, old: SlotFacts | None, new: SlotFacts | None) -> None:
        before, after = (facts.outside_roots if facts else frozenset() for facts in (old, new))
        for process in before - after:
            self.used_outside_by[process].discard(key)
            if not self.used_outside_by[process]:
                del self.used_outside_by[process]
        for process in after - before:
            self.used_outside_by.setdefault(process, set()).add(key)

    @property
    def nodes(self) -> KeysView[str]:
        return self._nodes.keys()

    def gpus_of(self, node: str) -> KeysView[GpuKey]:
        return self._nodes[node].facts.keys()

    def named(self, names: tuple[str, ...]) -> AbstractSet[GpuKey]:
        return self._names.find(names)

    def open_slots_of(self, node: str, *, shared: bool) -> Sequence[GpuSlot]:
        """The measured GPUs of a node that admit one more such lease, by index."""
        index = self._nodes[node]
        return index.open_to_shared if shared else index.open_to_exclusive

    def open_gpus(self, wishes: Wishes, thresholds: Thresholds, *, include_loaded: bool) -> Iterator[GpuKey]:
        """GPUs that may be eligible for one exclusive lease: least used first, then on the fullest node."""
        limit = thresholds.memory_percent + thresholds.utilization_percent
        for score, *_, key in _merged(self._matching(Use.EXCLUSIVE, wishes, include_loaded)):
            if score >= limit:
                return  # a GPU below both thresholds is below their sum
            yield key

    def fitting_gpus(self, wishes: Wishes, thresholds: Thresholds, *, include_loaded: bool) -> Iterator[GpuKey]:
        """GPUs that may be eligible for one shared lease: shared ones first, then whole ones; tightest fit first."""
        for use in (Use.SHARED, Use.WHOLE):
            fitting = []
            for group, entries in self._listed(use, wishes):
                if group.has_model(wishes.model) and (group.is_clear or include_loaded):
                    total_mb = group.of.total_mb if isinstance(group.of, GpuClass) else None
                    limit_mb = thresholds.memory_percent * (total_mb or 0.0) / 100
                    fitting.append(_tightest_first(entries, limit_mb - (wishes.memory_mb or 0.0)))
            for *_, key in _merged(fitting):
                yield key

    def nodes_with_room(self, wishes: Wishes, *, include_loaded: bool) -> Iterator[str]:
        """Nodes that may have enough open GPUs, fullest first."""
        lists = self._node_lists(wishes, include_loaded)
        for _, node in _merged([islice(entries, bisect_left(entries, (wishes.gpus,)), None) for entries in lists]):
            yield node

    def could_ever_serve(self, wishes: Wishes, thresholds: Thresholds) -> bool:
        """Whether some node has enough suitable GPUs, if all of them were free."""
        if wishes.among is None:
            return any(_has_enough(makeup, wishes, thresholds) for makeup in self._makeups)
        return any(
            _has_enough(self._named_on(node, wishes.among, in_service=False), wishes, thresholds)
            for node in self._nodes_with(wishes.among)
        )

    def could_serve_on(self, node: str, wishes: Wishes, thresholds: Thresholds) -> bool:
        """Whether a node has enough suitable GPUs in service, if all of them were free."""
        if wishes.among is None:
            return _has_enough(self._nodes[node].makeup_in_service, wishes, thresholds)
        return _has_enough(self._named_on(node, wishes.among, in_service=True), wishes, thresholds)

    def _nodes_with(self, names: tuple[str, ...]) -> set[str]:
        return {key.node for key in self._names.find(names)}

    def _named_on(self, node: str, names: tuple[str, ...], *, in_service: bool) -> list[GpuClass]:
        named = self._names.find(names)
        return [
            found.gpu_class
            for key, found in self._nodes[node].facts.items()
            if key in named and found.gpu_class and (found.is_in_service or (found.is_ours and not in_service))
        ]

    def _listed(self, use: Use, wishes: Wishes) -> Iterable[tuple[Group, list[Entry]]]:
        """The sorted lists, restricted to the GPUs in `among` and their nodes."""
        if wishes.among is None:
            return self._lists[use].items()
        named = self._names.find(wishes.among)
        lists: dict[Group, list[Entry]] = {}
        for node in self._nodes_with(wishes.among):
            for use_of_entry, group, entry in self._nodes[node].entries:
                if use_of_entry is use and (entry[-1] == node or entry[-1] in named):
                    insort(lists.setdefault(group, []), entry)
        return lists.items()

    def _matching(self, use: Use, wishes: Wishes, include_loaded: bool) -> list[list[Entry]]:  # noqa: FBT001 - private
        return [
            entries
            for group, entries in self._listed(use, wishes)
            if (group.is_clear or include_loaded) and group.has_model(wishes.model)
        ]

    def _node_lists(self, wishes: Wishes, include_loaded: bool) -> list[list[Entry]]:  # noqa: FBT001 - private
        use = Use.NODES_SHARED if wishes.is_shared else Use.NODES_EXCLUSIVE
        return [
            entries
            for group, entries in self._listed(use, wishes)
            if group.is_clear != include_loaded and group.has_model(wishes.model)
        ]


def _facts_of(
    slot: GpuSlot, settings: PoolSettings, excluded: Mapping[GpuKey, str], ignored_processes: AbstractSet[str]
) -> SlotFacts:
    reading = slot.reading
    if reading is None:
        return SlotFacts(inf, None)
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
    return SlotFacts(
        reading.gpu.index,
        gpu_class,
        slot.is_open_for(shared=False, **bounds),
        is_open_to_shared,
        used_percent(slot, ignored_processes),
        load_percent,
        use.committed_mb if use else None,
        is_open_to_shared and is_used_by_leases_only(slot, ignored_processes),
        outside is not None,
        outside.roots if outside and not slot.occupants else frozenset(),
    )


def _index_node(
    node: str, facts: dict[GpuKey, SlotFacts], slots: Mapping[GpuKey, GpuSlot], settings: PoolSettings
) -> _NodeIndex:
    ordered = sorted(facts.items(), key=lambda item: (item[1].gpu_index, item[0]))
    exclusive = [(key, found) for key, found in ordered if found.is_open_to_exclusive]
    shared = [(key, found) for key, found in ordered if found.is_open_to_shared]
    index = _NodeIndex(
        facts,
        open_to_exclusive=[slots[key] for key, _ in exclusive],
        open_to_shared=[slots[key] for key, _ in shared],
        makeup=tuple(
            sorted((found.gpu_class for _, found in ordered if found.gpu_class and found.is_ours), key=_by_name)
        ),
        makeup_in_service=tuple(found.gpu_class for _, found in ordered if found.gpu_class and found.is_in_service),
        indexed=tuple((found.gpu_index, key) for key, found in ordered if found.gpu_class),
    )
    limits = settings.thresholds
    clear_to_exclusive: list[SlotFacts] = []
    for key, found in exclusive:
        if found.percent is not None and found.gpu_class is not None:
            is_clear = found.percent < limits.memory_percent and found.load_percent < limits.utilization_percent
            is_clear = is_clear and not found.is_in_use_outside
            score = found.percent + found.load_percent
            by_use = (score, len(exclusive), node, found.gpu_index, found.percent, found.is_in_use_outside, key)
            index.entries.add((Use.EXCLUSIVE, Group(found.gpu_class, is_clear), by_use))
            clear_to_exclusive += [found] if is_clear else []
    clear_to_shared: list[SlotFacts] = []
    for key, found in shared:
        if found.committed_mb is not None and found.gpu_class is not None:
            is_ours = found.is_used_by_leases_only
            is_clear = is_ours or found.load_percent < limits.utilization_percent
            use, fewest = (Use.WHOLE, len(exclusive)) if found.is_whole else (Use.SHARED, 0)
            by_commitment = (-found.committed_mb, fewest, node, found.gpu_index, found.load_percent, is_ours, key)
            index.entries.add((use, Group(found.gpu_class, is_clear), by_commitment))
            clear_to_shared += [found] if is_clear else []
    for use_of_node, is_clear, counted in (
        (Use.NODES_EXCLUSIVE, True, clear_to_exclusive),
        (Use.NODES_EXCLUSIVE, False, [found for _, found in exclusive]),
        (Use.NODES_SHARED, True, clear_to_shared),
        (Use.NODES_SHARED, False, [found for _, found in shared]),
    ):
        if counted:
            names = frozenset(found.gpu_class.name for found in counted if found.gpu_class)
            index.entries.add((use_of_node, Group(names, is_clear), (len(counted), node)))
    return index


def _merged(lists: Sequence[Iterable[Entry]]) -> Iterable[Entry]:
    return lists[0] if len(lists) == 1 else merge(*lists)


def _tightest_first(entries: list[Entry], room_mb: float) -> Iterator[Entry]:
    """The entries with enough memory left, as (what would be left, ...)."""
    for negative_committed_mb, *rest in islice(entries, bisect_left(entries, (-room_mb - ROUNDING_MB,)), None):
        yield (room_mb + negative_committed_mb, *rest)


def _has_enough(makeup: Sequence[GpuClass], wishes: Wishes, thresholds: Thresholds) -> bool:
    return sum(_could_serve(gpu_class, wishes, thresholds) for gpu_class in makeup) >= wishes.gpus


def _could_serve(gpu_class: GpuClass, wishes: Wishes, thresholds: Thresholds) -> bool:
    if not matches_model(wishes.model, gpu_class.name):
        return False
    if thresholds.memory_percent <= 0 or thresholds.utilization_percent <= 0:
        return False  # no reading is below 0
    if wishes.memory_mb is None or gpu_class.total_mb is None:
        return True
    return wishes.memory_mb <= thresholds.memory_percent * gpu_class.total_mb / 100


def _by_name(gpu_class: GpuClass) -> tuple[str, float]:
    return (gpu_class.name, -1.0 if gpu_class.total_mb is None else gpu_class.total_mb)
