"""Indexes over the GPUs of a pool, so that a decision considers only the GPUs that matter.

The indexes propose; every proposal is judged before it is granted (see eligibility.py). They must not leave out an
eligible GPU. They follow from the slots. When facts about a GPU change, its own entries are replaced, and those of its node.

Of equally good GPUs, one on the node with the fewest open GPUs is proposed. That number is in no entry of a GPU: else one
grant would move the entries of all other GPUs of the node. Each node has lists of its own; the pool has where each of them begins.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace, merge
from itertools import chain, islice
from math import inf

from gpu_worker_pool.core.model.gpu import GpuKey, ProcessId
from gpu_worker_pool.core.model.gpu_names import GpuNames
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.thresholds import Thresholds

from .node_index import (
    BY_NODE,
    Entry,
    GpuClass,
    Group,
    ListKey,
    Lists,
    Makeup,
    NodeIndex,
    SlotFacts,
    Use,
    facts_of,
    makeup_of,
    move_entries,
    no_lists,
)

# What was known of a GPU, and what is; None if it was not known, or is gone.
FactsChange = tuple[GpuKey, SlotFacts | None, SlotFacts | None]

# Sums of floats may differ in the last bits from those of `judge`, which decides such close cases.
ROUNDING_MB = 1e-3
# Entries of so many nodes are left for the next decision to derive.
MOST_OUTDATED = 8
NO_ROOTS: frozenset[ProcessId] = frozenset()


@dataclass(slots=True)
class Capacity:
    """Finds GPUs by use, by committed memory and by name, and nodes by their number of open GPUs.

    A change of a GPU concerns all lists by node, and the next decision asks for few of them. So the entries of a node there are
    derived when a list is asked for; until then the node is in `_outdated`. A decision derives those of a few nodes at most.
    """

    _nodes: dict[str, NodeIndex] = field(default_factory=dict)
    _lists: Lists = field(default_factory=no_lists)
    _outdated: dict[Use, set[str]] = field(default_factory=lambda: {use: set() for use in BY_NODE})
    _makeups: Counter[Makeup] = field(default_factory=Counter)
    _names: GpuNames = field(default_factory=GpuNames, compare=False)
    # The GPUs that only one process outside the pool and its descendants use.
    used_outside_by: dict[ProcessId, set[GpuKey]] = field(default_factory=dict)

    def refresh(
        self,
        touched: AbstractSet[GpuKey],
        slots: Mapping[GpuKey, GpuSlot],
        settings: PoolSettings,
        excluded: Mapping[GpuKey, str],
        ignored_processes: AbstractSet[str],
    ) -> bool:
        """Update the indexes for these GPUs; one without a slot is dropped. Return whether it may affect a request."""
        changed: dict[str, list[FactsChange]] = {}
        for key in touched:
            slot, index = slots.get(key), self._nodes.get(key.node)
            known = index.facts.get(key) if index else None
            found = None if slot is None else facts_of(slot, settings, excluded, ignored_processes)
            if found != known:
                changed.setdefault(key.node, []).append((key, known, found))
        may_matter = False
        for node in sorted(changed):
            may_matter |= self._reindex(node, changed[node])
        return may_matter

    def _reindex(self, node: str, changes: Iterable[FactsChange]) -> bool:
        index = self._nodes.get(node)
        is_new = index is None
        if index is None:
            index = self._nodes[node] = NodeIndex(node)
        makeup, in_service = index.makeup, index.makeup_in_service
        is_any_moved = is_renamed = False
        for key, known, found in changes:
            for list_key, lost, gained in index.replace(key, found):
                is_any_moved = True
                if list_key[0] is Use.SHARED:  # the pool has these one by one
                    self._move_shared(index, list_key, lost, gained)
            # The same index and class mean the same names.
            if known is None or found is None or known[:2] != found[:2]:
                is_renamed |= self._rename(key, known, found)
            roots, new_roots = known.outside_roots if known else NO_ROOTS, found.outside_roots if found else NO_ROOTS
            if roots != new_roots:
                self._note_roots(key, roots, new_roots)
        index.count_again()
        self._list_later(node)
        if not index.facts:
            for use in BY_NODE:
                self._bring_up_to_date(use)
            del self._nodes[node]
        if is_new or not index.facts or makeup != index.makeup:
            self._count_makeup(makeup, -(not is_new))
            self._count_makeup(index.makeup, bool(index.facts))
        # If a name now means another GPU, or none, a request by that name could use other GPUs than before.
        return bool(is_new or is_renamed or is_any_moved or index.makeup_in_service != in_service)

    def _list_later(self, node: str) -> None:
        for use, outdated in self._outdated.items():
            if node not in outdated:
                outdated.add(node)
                if len(outdated) > MOST_OUTDATED:
                    self._bring_up_to_date(use)

    def _move_shared(self, index: NodeIndex, list_key: ListKey, *entries: Entry | None) -> None:
        lost, gained = (entry and next(index.in_pool(Use.SHARED, (entry,))) for entry in entries)
        move_entries(self._lists, [(list_key, lost, gained)])

    def _rename(self, key: GpuKey, known: SlotFacts | None, found: SlotFacts | None) -> bool:
        """Note the names of a GPU: its index, and the UUID in its key. It has none before its class is known."""
        old, new = ([(facts.gpu_index, key)] if facts and facts.gpu_class else [] for facts in (known, found))
        if old != new:
            self._names.change(old, new)
        return old != new

    def _bring_up_to_date(self, use: Use) -> None:
        for node in self._outdated[use]:
            move_entries(self._lists, self._nodes[node].list_again(use))
        self._outdated[use].clear()

    def _lists_of(self, use: Use) -> Mapping[Group, list[Entry]]:
        if self._outdated.get(use):
            self._bring_up_to_date(use)
        return self._lists[use]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Capacity):
            return NotImplemented
        return self._known() == other._known()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def _known(self) -> tuple[object, ...]:
        for use in BY_NODE:
            self._bring_up_to_date(use)
        return (self._nodes, self._lists, self._makeups, self.used_outside_by)

    def _count_makeup(self, makeup: Makeup, number: int) -> None:
        self._makeups[makeup] += number
        if not self._makeups[makeup]:
            del self._makeups[makeup]

    def _note_roots(self, key: GpuKey, before: AbstractSet[ProcessId], after: AbstractSet[ProcessId]) -> None:
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

    def open_gpus_of(self, node: str, *, shared: bool) -> Iterator[GpuKey]:
        """The measured GPUs of a node that admit one more such lease, by index."""
        index = self._nodes[node]
        return (key for _, key in (index.open_to_shared if shared else index.open_to_exclusive).places)

    def open_gpus(self, wishes: Wishes, thresholds: Thresholds, *, include_loaded: bool) -> Iterator[GpuKey]:
        """GPUs that may be eligible for one exclusive lease: least used first, then on the fullest node."""
        limit = thresholds.memory_percent + thresholds.utilization_percent
        groups = self._groups(Use.EXCLUSIVE, wishes, include_loaded)
        for score, *_, key in _merged([self._entries(Use.EXCLUSIVE, group, wishes) for group in groups]):
            if score >= limit:
                return  # a GPU below both thresholds is below their sum
            yield key

    def fitting_gpus(self, wishes: Wishes, thresholds: Thresholds, *, include_loaded: bool) -> Iterator[GpuKey]:
        """GPUs that may be eligible for one shared lease: shared ones first, then whole ones; tightest fit first."""
        for use in (Use.SHARED, Use.WHOLE):
            fitting = []
            for group in self._groups(use, wishes, include_loaded):
                total_mb = group.of.total_mb if isinstance(group.of, GpuClass) else None
                room_mb = thresholds.memory_percent * (total_mb or 0.0) / 100 - (wishes.memory_mb or 0.0)
                fitting.append(_by_room_left(self._entries(use, group, wishes, -room_mb - ROUNDING_MB), room_mb))
            for *_, key in _merged(fitting):
                yield key

    def nodes_with_room(self, wishes: Wishes, *, include_loaded: bool) -> Iterator[str]:
        """Nodes that may have enough open GPUs, fullest first."""
        lists = self._node_lists(wishes, include_loaded)
        for _, node in _merged([islice(entries, bisect_left(entries, (wishes.gpus,)), None) for entries in lists]):
            yield node

    def most_room_mb(self, wishes: Wishes, thresholds: Thresholds, *, include_loaded: bool) -> float:
        """At most so much of each GPU can be had by wishes like these; below 0 if no GPU is proposed for any of them."""
        if wishes.gpus > 1:
            nodes = self._node_lists(wishes, include_loaded)
            return inf if any(entries[-1][0] >= wishes.gpus for entries in nodes) else -inf
        if not wishes.is_shared:
            return inf if self._groups(Use.EXCLUSIVE, wishes, include_loaded) else -inf
        most_mb = -inf
        for use in (Use.WHOLE, Use.SHARED):
            for group in self._groups(use, wishes, include_loaded):
                total_mb = group.of.total_mb if isinstance(group.of, GpuClass) else None
                committed_mb = -self._lists_of(use)[group][-1][0] if use is Use.SHARED else 0.0
                limit_mb = thresholds.memory_percent * (total_mb or 0.0) / 100
                most_mb = max(most_mb, limit_mb - committed_mb + ROUNDING_MB)
        return most_mb

    def largest_mb(self, model: str | None) -> float | None:
        """The memory of the GPUs of a model that have most; None if that is unknown."""
        sizes = [
            gpu_class.total_mb
            for makeup in self._makeups
            for gpu_class, _ in makeup
            if matches_model(model, gpu_class.name)
        ]
        return max((size for size in sizes if size is not None), default=None)

    def could_ever_serve(self, wishes: Wishes, thresholds: Thresholds) -> bool:
        """Whether enough nodes have enough suitable GPUs, if all of them were free."""
        if wishes.node is not None:
            return _has_enough(self._makeup_on(wishes.node, wishes, in_service=False), wishes, thresholds)
        if wishes.among is None:
            nodes = 0
            for makeup, alike in self._makeups.items():
                if _has_enough(makeup, wishes, thresholds):
                    nodes += alike
                    if nodes >= wishes.nodes:
                        return True
            return False
        named = (self._makeup_on(node, wishes, in_service=False) for node in self._nodes_with(wishes.among))
        return sum(_has_enough(makeup, wishes, thresholds) for makeup in named) >= wishes.nodes

    def could_serve_on(self, node: str, wishes: Wishes, thresholds: Thresholds) -> bool:
        """Whether a node has its part of enough suitable GPUs in service, if all of them were free."""
        return _has_enough(self._makeup_on(node, wishes, in_service=True), wishes, thresholds)

    def nodes_for(self, wishes: Wishes) -> AbstractSet[str]:
        """The nodes that a request considers: its own, or all."""
        return self._nodes.keys() if wishes.node is None else self._nodes.keys() & {wishes.node}

    def _nodes_with(self, names: tuple[str, ...]) -> set[str]:
        return {key.node for key in self._names.find(names)}

    def _makeup_on(self, node: str, wishes: Wishes, *, in_service: bool) -> Makeup:
        index = self._nodes.get(node)
        if index is None:
            return ()
        if wishes.among is None:
            return index.makeup_in_service if in_service else index.makeup
        named = self._names.find(wishes.among)
        return makeup_of(
            found.gpu_class
            for key, found in index.facts.items()
            if key in named and (found.is_in_service or (found.is_ours and not in_service))
        )

    def _node_of(self, name: str) -> NodeIndex:
        """The one node that is asked for; one without GPUs if it is not known."""
        return self._nodes.get(name) or NodeIndex(name)

    def _groups(self, use: Use, wishes: Wishes, include_loaded: bool) -> Iterable[Group]:  # noqa: FBT001 - private
        own, model = None if wishes.node is None else self._node_of(wishes.node), wishes.model
        return [
            group
            for group in (self._lists_of(use) if own is None else own.lists[use])
            if (group.is_clear or include_loaded) and (model is None or group.has_model(model))
        ]

    def _entries(self, use: Use, group: Group, wishes: Wishes, least: float = -inf) -> Iterator[Entry]:
        """The entries of a list, from this value on, of the GPUs and the node that are asked for."""
        if wishes.among is not None:
            return iter(self._entries_named(use, group, wishes, least))
        if wishes.node is not None:
            return self._node_of(wishes.node).entries_from(use, group, least)
        if use is Use.SHARED:
            entries = self._lists_of(use)[group]
            return islice(entries, bisect_left(entries, (least,)), None)
        heads = self._lists_of(use)[group]
        if len(heads) == 1:
            return self._nodes[heads[0][-1]].entries_from(use, group, least)  # one node has them all, in this order
        return self._entries_by_node(heads, use, group, least)

    def _entries_named(self, use: Use, group: Group, wishes: Wishes, least: float) -> list[Entry]:
        named = self._names.find(wishes.among or ())
        nodes = self.nodes_for(wishes)
        return sorted(
            in_pool
            for key in named
            if key.node in nodes
            if (entry := self._nodes[key.node].entries[key].get((use, group))) and entry[0] >= least
            for in_pool in self._nodes[key.node].in_pool(use, (entry,))
        )

    def _entries_by_node(self, heads: Sequence[Entry], use: Use, group: Group, least: float) -> Iterator[Entry]:
        """The lists of all nodes as one. A node's list is looked at only once its first entry is due."""
        first = bisect_left(heads, (least,))
        begun: list[tuple[Entry, Iterator[Entry]]] = []

        def begin(node: str) -> None:
            entries = self._nodes[node].entries_from(use, group, least)
            if (entry := next(entries, None)) is not None:
                heappush(begun, (entry, entries))

        for _, _, node in islice(heads, first):
            begin(node)
        for head in chain(islice(heads, first, None), (None,)):
            while begun and (head is None or begun[0][0] < head):
                entry, entries = begun[0]
                yield entry
                if (later := next(entries, None)) is None:
                    heappop(begun)
                else:
                    heapreplace(begun, (later, entries))
            if head is not None:
                begin(head[2])

    def _node_lists(self, wishes: Wishes, include_loaded: bool) -> list[list[Entry]]:  # noqa: FBT001 - private
        use = Use.NODES_SHARED if wishes.is_shared else Use.NODES_EXCLUSIVE
        lists: Mapping[Group, list[Entry]]
        if wishes.among is None and wishes.node is None:
            lists = self._lists_of(use)
        else:
            of_nodes: dict[Group, list[Entry]] = {}
            lists = of_nodes
            nodes = self.nodes_for(wishes)
            for node in nodes if wishes.among is None else nodes & self._nodes_with(wishes.among):
                for (_, group), entry in self._nodes[node].derive(use).items():
                    insort(of_nodes.setdefault(group, []), entry)
        return [
            entries
            for group, entries in lists.items()
            if group.is_clear != include_loaded and group.has_model(wishes.model)
        ]


def _merged(lists: Sequence[Iterable[Entry]]) -> Iterable[Entry]:
    return lists[0] if len(lists) == 1 else merge(*lists)


def _by_room_left(entries: Iterable[Entry], room_mb: float) -> Iterator[Entry]:
    """The entries as (the MB that would be left, ...)."""
    for negative_committed_mb, *rest in entries:
        yield (room_mb + negative_committed_mb, *rest)


def _has_enough(makeup: Makeup, wishes: Wishes, thresholds: Thresholds) -> bool:
    return sum([count for gpu_class, count in makeup if _could_serve(gpu_class, wishes, thresholds)]) >= wishes.gpus


def _could_serve(gpu_class: GpuClass, wishes: Wishes, thresholds: Thresholds) -> bool:
    if not matches_model(wishes.model, gpu_class.name):
        return False
    if thresholds.memory_percent <= 0 or thresholds.utilization_percent <= 0:
        return False  # no reading is below 0
    if wishes.memory_mb is None or gpu_class.total_mb is None:
        return True
    return wishes.memory_mb <= thresholds.memory_percent * gpu_class.total_mb / 100
