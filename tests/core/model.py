"""A second pool, written as plainly as possible: it scans everything, keeps no index and shares no rule with the core.

The tests hold the core against it: whatever the core grants must be what the rules say, and whoever it lets wait must
have to wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Key = Any
FOREVER = float("inf")


@dataclass
class Lease:
    id: str
    request: Any
    seq: int
    due: float
    gpus: tuple[Key, ...] = ()
    state: str = "queued"
    since: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        return (-self.request.priority, self.seq)


@dataclass
class Model:
    settings: Any
    now: float = -FOREVER
    boot_id: str | None = None
    readings: dict[Key, Any] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    members: dict[tuple[Key, str], set[Any]] = field(default_factory=dict)
    excluded: set[Key] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    fences: dict[str, int] = field(default_factory=dict)

    # What is asked of it

    def on(self, key: Key) -> list[Lease]:
        return [lease for lease in self.leases.values() if key in lease.gpus]

    def queue(self) -> list[Lease]:
        return sorted(
            (lease for lease in self.leases.values() if lease.state == "queued"), key=lambda x: x.order
        )

    def is_mine(self, key: Key, lease: Lease, process: Any) -> bool:
        holder = lease.request.holder
        roots = set(self.members.get((key, lease.id), set()))
        if holder.is_local and holder.pid is not None:
            roots.add((holder.pid, holder.pid_started))
        return any(tuple(link) in roots for link in (process.id, *process.ancestors))

    def outside_processes(self, key: Key) -> list[Any] | None:
        processes = self.readings[key].processes
        if processes is None:
            return None
        mine = {member for lease in self.on(key) for member in self.members.get((key, lease.id), set())}
        return [p for p in processes if tuple(p.id) not in mine and p.name not in self.ignored]

    def committed(self, key: Key) -> float:
        """Every lease in the tests has a process whose memory is known, or none at all, so this is the plain sum."""
        reading = self.readings[key]
        total, explained = 0.0, 0.0
        for lease in self.on(key):
            observed = sum(
                p.memory_mb
                for p in reading.processes
                if tuple(p.id) in self.members.get((key, lease.id), set())
            )
            total += max(lease.request.wishes.memory_mb or 0.0, observed)
            explained += observed
        explained += sum(p.memory_mb for p in reading.processes if p.name in self.ignored)
        return total + max(reading.memory_used_mb - explained, 0.0)

    def thresholds(self, wishes: Any) -> tuple[float, float]:
        memory, utilization = wishes.memory_threshold_percent, wishes.utilization_threshold_percent
        return (
            self.settings.thresholds.memory_percent if memory is None else memory,
            self.settings.thresholds.utilization_percent if utilization is None else utilization,
        )

    def has_place(self, key: Key, wishes: Any) -> bool:
        """Whether the leases on a GPU leave a place for such a request, memory aside."""
        others = self.on(key)
        if any(lease.state == "draining" for lease in others):
            return False
        if wishes.memory_mb is not None:
            return all(lease.request.wishes.memory_mb is not None for lease in others)
        if any(lease.request.wishes.memory_mb is not None for lease in others):
            return False
        return len(others) < self.settings.workers_per_gpu

    def is_suitable(self, key: Key, wishes: Any) -> bool:
        """Whether a GPU could serve a request if nobody were on it."""
        reading = self.readings.get(key)
        if reading is None or reading.fault or key in self.excluded:
            return False
        if self.now - reading.at > self.settings.stale_after_s:
            return False
        return wishes.model is None or wishes.model in reading.gpu.name

    def is_usable(self, key: Key, wishes: Any) -> bool:
        if not self.is_suitable(key, wishes) or not self.has_place(key, wishes):
            return False
        reading = self.readings[key]
        memory, utilization = self.thresholds(wishes)
        if reading.memory_used_mb is None or reading.utilization_percent is None:
            return False
        if wishes.memory_mb is not None:
            if self.committed(key) + wishes.memory_mb > memory * reading.memory_total_mb / 100:
                return False
            if self.on(key) and self.outside_processes(key) == []:
                return True
        else:
            ignored = sum(p.memory_mb for p in reading.processes if p.name in self.ignored)
            if 100 * max(reading.memory_used_mb - ignored, 0) / reading.memory_total_mb >= memory:
                return False
        return bool(reading.utilization_percent < utilization)

    def nodes(self) -> list[str]:
        return sorted({key.node for key in self.readings})

    def usable_on(self, node: str, wishes: Any, gone: set[Key]) -> list[Key]:
        return [k for k in self.readings if k.node == node and k not in gone and self.is_usable(k, wishes)]

    def next_served(self) -> tuple[Lease, list[set[Key]]] | None:
        """The first waiter who can be served, with the sets of GPUs he may be given some of (one set a node)."""
        for lease, options, _ in self.turns():
            if options:
                return lease, options
        return None

    def turns(self) -> Iterator[tuple[Lease, list[set[Key]], set[Key]]]:
        """Each waiter in order, with what he could be given and, where that is nothing, what he holds."""
        gone: set[Key] = set()
        is_first = True
        for lease in self.queue():
            wishes = lease.request.wishes
            usable = {node: self.usable_on(node, wishes, gone) for node in self.nodes()}
            options = [set(keys) for keys in usable.values() if len(keys) >= wishes.gpus]
            held: set[Key] = set()
            if not options:
                held = self.holds(wishes, usable, gone, is_first=is_first)
                gone |= held
                is_first = False
            yield lease, options, held

    def holds(self, wishes: Any, usable: dict[str, list[Key]], gone: set[Key], *, is_first: bool) -> set[Key]:
        node = min(usable, key=lambda name: (-len(usable[name]), name), default=None)
        free = usable[node] if node is not None else []
        if not is_first:
            return set(free)
        shared = [key for key in self.readings if key not in gone and self.is_kept_by_sharers(key, wishes)]
        shared.sort(key=lambda key: (self.committed(key), key.node, self.readings[key].gpu.index))
        if free:
            shared = [key for key in shared if key.node == free[0].node]
        elif wishes.gpus == 1:
            shared = shared[:1]
        else:
            shared = [key for key in shared if key.node == shared[0].node]
        shared.sort(key=lambda key: self.readings[key].gpu.index)
        return set([*free, *shared][: wishes.gpus])

    def is_kept_by_sharers(self, key: Key, wishes: Any) -> bool:
        others = self.on(key)
        reading = self.readings[key]
        if not others or any(x.request.wishes.memory_mb is None or x.state == "draining" for x in others):
            return False
        if reading.memory_used_mb is None or reading.utilization_percent is None:
            return False
        if wishes.memory_mb is None:
            # An exclusive request is kept out by the leases, whatever the age of the reading.
            return not reading.fault and key not in self.excluded and self._fits_model(key, wishes)
        memory, _ = self.thresholds(wishes)
        limit = memory * reading.memory_total_mb / 100
        if not self.is_suitable(key, wishes) or wishes.memory_mb > limit:
            return False
        return bool(self.committed(key) + wishes.memory_mb > limit)

    def _fits_model(self, key: Key, wishes: Any) -> bool:
        return wishes.model is None or wishes.model in self.readings[key].gpu.name
