"""Indexes over the GPUs of a pool, so that a decision considers only the GPUs that matter.

The indexes propose; every proposal is judged before it is granted (see eligibility.py). They must not leave out an
eligible GPU. They follow from the slots. When facts about a GPU change, its own entries are replaced; its node is indexed
again only if they concern the node's other GPUs as well.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import merge
from itertools import accumulate, islice

from gpu_worker_pool.core.model.gpu import GpuKey, ProcessId
from gpu_worker_pool.core.model.gpu_names import GpuNames
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.model.settings import PoolSettings, Thresholds
from gpu_worker_pool.core.model.slot import GpuSlot

from .node_index import Entry, GpuClass, Group, Listed, Makeup, NodeIndex, SlotFacts, Use, facts_of, makeup_of

# Sums of floats may differ in the last bits from those of `judge`, which decides such close cases.
ROUNDING_MB = 1e-3


@dataclass(slots=True)
class Capacity:
    """Finds GPUs by use, by committed memory and by name, and nodes by their number of open GPUs."""

    _nodes: dict[str, NodeIndex] = field(default_factory=dict)
    _lists: dict[Use, dict[Group, list[Entry]]] = field(default_factory=lambda: {use: {} for use in Use})
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
        changed: dict[str, dict[GpuKey, SlotFacts | None]] = {}
        for key in touched:
            slot, index = slots.get(key), self._nodes.get(key.node)
            facts = None if slot is None else facts_of(slot, settings, excluded, ignored_processes)
            if facts != (index.facts.get(key) if index else None):
                changed.setdefault(key.node, {})[key] = facts
                self._note_roots(key, index.facts.get(key) if index else None, facts)
        matters = [self._reindex(node, changed[node], slots) for node in sorted(changed)]
        return any(matters)

    def _reindex(self, node: str, changes: Mapping[GpuKey, SlotFacts | None], slots: Mapping[GpuKey, GpuSlot]) -> bool:
        old = self._nodes.get(node)
        if old is not None and old.keeps_shape(changes):
            lost, gained = old.update(changes)
            self._relist(lost, gained)
            return bool(lost or gained)
        old = old or NodeIndex()
        known = {**old.facts, **changes}
        new = NodeIndex.derive(node, {key: found for key, found in known.items() if found is not None}, slots)
        self._relist(old.entries - new.entries, new.entries - old.entries)
        is_new = self._nodes.pop(node, None) is None
        if not is_new:
            self._makeups[old.makeup] -= 1
            if not self._makeups[old.makeup]:
                del self._makeups[old.makeup]
        if new.facts:
            self._nodes[node] = new
            self._makeups[new.makeup] += 1
        is_renamed = new.indexed != old.indexed
        if is_renamed:
            self._names.change(old.indexed, new.indexed)
        # If a name now means another GPU, or none, a request by that name could use other GPUs than before.
        return is_new or is_renamed or new.entries != old.entries or new.makeup_in_service != old.makeup_in_service

    def _relist(self, lost: Iterable[Listed], gained: Iterable[Listed]) -> None:
        for use, group, entry in lost:
            entries = self._lists[use][group]
            del entries[bisect_left(entries, entry)]
            if not entries:
                del self._lists[use][group]
        for use, group, entry in gained:
            insort(self._lists[use].setdefault(group, []), entry)

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
            alike = (self._makeups[makeup] for makeup in self._makeups if _has_enough(makeup, wishes, thresholds))
            return any(number >= wishes.nodes for number in accumulate(alike))
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
            if key in named and found.gpu_class and (found.is_in_service or (found.is_ours and not in_service))
        )

    def _listed(self, use: Use, wishes: Wishes) -> Iterable[tuple[Group, list[Entry]]]:
        """The sorted lists, restricted to the node that is asked for, and to the GPUs in `among` and their nodes."""
        if wishes.among is None and wishes.node is None:
            return self._lists[use].items()
        named = None if wishes.among is None else self._names.find(wishes.among)
        lists: dict[Group, list[Entry]] = {}
        nodes = self.nodes_for(wishes)
        for node in nodes if wishes.among is None else nodes & self._nodes_with(wishes.among):
            for use_of_entry, group, entry in self._nodes[node].entries:
                if use_of_entry is use and (named is None or entry[-1] == node or entry[-1] in named):
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


def _merged(lists: Sequence[Iterable[Entry]]) -> Iterable[Entry]:
    return lists[0] if len(lists) == 1 else merge(*lists)


def _tightest_first(entries: list[Entry], room_mb: float) -> Iterator[Entry]:
    """The entries with enough memory left, as (what would be left, ...)."""
    for negative_committed_mb, *rest in islice(entries, bisect_left(entries, (-room_mb - ROUNDING_MB,)), None):
        yield (room_mb + negative_committed_mb, *rest)


def _has_enough(makeup: Makeup, wishes: Wishes, thresholds: Thresholds) -> bool:
    return sum(count for gpu_class, count in makeup if _could_serve(gpu_class, wishes, thresholds)) >= wishes.gpus


def _could_serve(gpu_class: GpuClass, wishes: Wishes, thresholds: Thresholds) -> bool:
    if not matches_model(wishes.model, gpu_class.name):
        return False
    if thresholds.memory_percent <= 0 or thresholds.utilization_percent <= 0:
        return False  # no reading is below 0
    if wishes.memory_mb is None or gpu_class.total_mb is None:
        return True
    return wishes.memory_mb <= thresholds.memory_percent * gpu_class.total_mb / 100
