"""What decisions need to know of each GPU, derived from its slot when that changes, and a summary for each node.

The facts propose a GPU; it is judged before it is granted (see queue/eligibility.py). They must not leave out an eligible GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from .bounds import Thresholds
from .gpu import GpuKey, ProcessId
from .request import Wishes, matches_model
from .settings import PoolSettings
from .slot import GpuSlot, is_used_by_leases_only, memory_use, outside_use, used_percent

NOBODY: frozenset[ProcessId] = frozenset()


class SlotFacts(NamedTuple):
    """What is known of one GPU. `name` is None if it is known by its leases only. `is_open_to_...` says whether the leases
    there admit one more; it is None if the GPU is out of service or cannot be measured. For `position` see gpu.py.
    """

    gpu_index: float
    position: float = inf
    name: str | None = None
    total_mb: float | None = None
    is_open_to_exclusive: bool | None = None
    is_open_to_shared: bool | None = None
    percent: float | None = None
    load_percent: float = 0.0
    committed_mb: float | None = None
    # Both decide what is eligible, so the queue is served again when one of them changes.
    is_used_by_leases_only: bool = False
    is_in_use_outside: bool = False
    # False if another server has it.
    is_ours: bool = True
    # The processes that may have the GPU though it is in use, because they alone use it: one that released it and still holds
    # memory there, or one outside the pool.
    left_to: frozenset[ProcessId] = NOBODY

    @property
    def is_in_service(self) -> bool:
        return self.is_open_to_exclusive is not None

    @property
    def room_mb(self) -> float:
        """The memory that is not committed; none if the GPU is not open to a share."""
        if not self.is_open_to_shared or self.committed_mb is None:
            return -inf
        return (self.total_mb or 0.0) - self.committed_mb

    def could_serve(self, wishes: Wishes, thresholds: Thresholds) -> bool:
        """Whether the GPU would do if it were free and in service."""
        if self.name is None or not matches_model(wishes.model, self.name) or min(thresholds) <= 0:
            return False  # no reading is below 0
        if self.total_mb is None:
            return True
        granted_mb = thresholds.memory_percent * self.total_mb / 100
        return wishes.is_large_enough(self.total_mb) and (wishes.memory_mb or 0.0) <= granted_mb


def facts_of(
    slot: GpuSlot, settings: PoolSettings, excluded: Container[GpuKey], ignored_processes: Collection[str]
) -> SlotFacts:
    reading, installed = slot.reading, slot.installed
    if reading is None:
        if installed is None:
            return SlotFacts(inf)
        return SlotFacts(installed.index, installed.index, installed.name, installed.memory_total_mb)
    gpu = reading.gpu
    known = SlotFacts(gpu.index, gpu.place, gpu.name, reading.memory_total_mb)
    if reading.other_server is not None:
        return known._replace(is_ours=False)
    load_percent, percent = reading.load_percent, used_percent(slot, ignored_processes)
    if reading.fault is not None or slot.key in excluded:
        return known
    if load_percent is None or percent is None:
        # The load may be that of the process that left it: to that process it may be usable.
        return known._replace(left_to=_left_to(slot))
    if slot.occupants and not slot.is_open_for(shared=True, max_sharers=settings.max_sharers):
        # Whatever is read of it, it is nobody else's until a lease ends.
        return known._replace(is_open_to_exclusive=False, is_open_to_shared=False, left_to=_left_to(slot))
    use = memory_use(slot, ignored_processes)
    outside = None if settings.outsiders == "thresholds" else outside_use(slot, settings, ignored_processes)
    return known._replace(
        is_open_to_exclusive=not slot.occupants,
        is_open_to_shared=True,
        percent=percent,
        load_percent=load_percent,
        committed_mb=use.committed_mb if use else None,
        is_used_by_leases_only=is_used_by_leases_only(slot, ignored_processes),
        is_in_use_outside=outside is not None,
        left_to=outside.roots if outside and not slot.occupants else NOBODY,
    )


def _left_to(slot: GpuSlot) -> frozenset[ProcessId]:
    """The one process whose leases drain there, after it released them."""
    processes = {each.process if each.was_left else None for each in slot.occupants.values()}
    return frozenset(process for process in processes if process is not None) if len(processes) == 1 else NOBODY


@dataclass(slots=True)
class NodeFacts:
    """The GPUs of one node, and a summary by which a node that cannot serve a request is skipped. `most_room_mb` is what a share
    may ask for at most, by the pool's own memory threshold.
    """

    gpus: dict[GpuKey, SlotFacts] = field(default_factory=dict)
    open_to_exclusive: int = 0
    open_to_shared: int = 0
    most_room_mb: float = -inf
    # The processes that use a GPU here alone, though no lease of theirs is active on it.
    left_to: frozenset[ProcessId] = NOBODY

    def sum_up(self, memory_percent: float) -> None:
        self.open_to_exclusive = self.open_to_shared = 0
        self.most_room_mb = -inf
        self.left_to = NOBODY.union(*(facts.left_to for facts in self.gpus.values()))
        for facts in self.gpus.values():
            if facts.is_open_to_shared:
                self.open_to_shared += 1
                self.open_to_exclusive += bool(facts.is_open_to_exclusive)
                if facts.committed_mb is not None and facts.total_mb is not None:
                    room_mb = memory_percent * facts.total_mb / 100 - facts.committed_mb
                    self.most_room_mb = max(self.most_room_mb, room_mb)


@dataclass(slots=True)
class PoolFacts:
    """The facts of all GPUs, by node."""

    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    _named: dict[tuple[object, ...], frozenset[GpuKey]] = field(default_factory=dict, compare=False)

    def refresh(
        self,
        touched: Collection[GpuKey],
        slots: Mapping[GpuKey, GpuSlot],
        settings: PoolSettings,
        excluded: Container[GpuKey],
        ignored_processes: Collection[str],
    ) -> bool:
        """Derive the facts of these GPUs again; one without a slot is dropped. Return whether any changed."""
        changed: set[str] = set()
        for key in touched:
            slot, node = slots.get(key), self.nodes.get(key.node)
            known = node.gpus.get(key) if node else None
            found = None if slot is None else facts_of(slot, settings, excluded, ignored_processes)
            if found == known:
                continue
            changed.add(key.node)
            if found is None:
                del self.nodes[key.node].gpus[key]
            else:
                self.nodes.setdefault(key.node, NodeFacts()).gpus[key] = found
            if known is None or found is None or (known.gpu_index, known.name) != (found.gpu_index, found.name):
                self._named.clear()
        for name in changed:
            node = self.nodes[name]
            node.sum_up(settings.thresholds.memory_percent)
            if not node.gpus:
                del self.nodes[name]
        return bool(changed)

    @property
    def is_any_left(self) -> bool:
        """Whether a process uses a GPU alone, though no lease of it is active there."""
        return any(node.left_to for node in self.nodes.values())

    def left_to(self, process: ProcessId | None) -> list[GpuKey]:
        """The GPUs that this process so uses."""
        nodes = [node for node in self.nodes.values() if process in node.left_to]
        return [key for node in nodes for key, facts in node.gpus.items() if process in facts.left_to]

    def of(self, key: GpuKey) -> SlotFacts:
        return self.nodes[key.node].gpus[key]

    def nodes_for(self, wishes: Wishes) -> Iterable[tuple[str, NodeFacts]]:
        """The nodes that a request considers: its own, or all."""
        if wishes.node is None:
            return self.nodes.items()
        node = self.nodes.get(wishes.node)
        return () if node is None else ((wishes.node, node),)

    def named(self, wishes: Wishes) -> frozenset[GpuKey] | None:
        """The GPUs that the names of a request leave to it (see gpu_names.py); None if it has no names. The beginning of a UUID
        must match one GPU of a node, as in CUDA: a client that asked for one GPU must not get another. For the same reason all
        that begin like a GPU that is left out are left out.
        """
        if wishes.among is None and wishes.exclude is None:
            return None
        names = (wishes.among, wishes.exclude)
        if names not in self._named:
            among = {key for name in wishes.among or ("",) for key in self._with_name(name.lower(), is_sure=bool(name))}
            left_out = {key for name in wishes.exclude or () for key in self._with_name(name.lower(), is_sure=False)}
            self._named[names] = frozenset(among - left_out)
        return self._named[names]

    def _with_name(self, name: str, *, is_sure: bool) -> Iterator[GpuKey]:
        for node in self.nodes.values():
            known = [(key, facts) for key, facts in node.gpus.items() if facts.name is not None]
            if name.isdigit():
                yield from (key for key, facts in known if facts.gpu_index == int(name))
                continue
            alike = [key for key, _ in known if key.uuid.lower().startswith(name)]
            exact = [key for key in alike if key.uuid.lower() == name]
            if len(exact or alike) == 1 or not is_sure:
                yield from exact or alike

    def could_serve(self, node: NodeFacts, wishes: Wishes, thresholds: Thresholds, *, in_service: bool) -> bool:
        """Whether a node has its part of enough suitable GPUs, if all of them were free."""
        named, lacking = self.named(wishes), wishes.gpus
        for key, facts in node.gpus.items():
            is_there = facts.is_in_service if in_service else facts.is_ours
            if is_there and (named is None or key in named) and facts.could_serve(wishes, thresholds):
                lacking -= 1
                if not lacking:
                    return True
        return False

    def could_ever_serve(self, wishes: Wishes, thresholds: Thresholds) -> bool:
        """Whether enough nodes have enough suitable GPUs, if all of them were free and in service."""
        nodes = 0
        for _, node in self.nodes_for(wishes):
            nodes += self.could_serve(node, wishes, thresholds, in_service=False)
            if nodes >= wishes.nodes:
                return True
        return False

    def largest_mb(self, model: str | None) -> float | None:
        """The memory of the GPUs of a model that have most; None if that is unknown."""
        sizes = [
            facts.total_mb
            for node in self.nodes.values()
            for facts in node.gpus.values()
            if facts.total_mb is not None and facts.name and matches_model(model, facts.name)
        ]
        return max(sizes, default=None)
