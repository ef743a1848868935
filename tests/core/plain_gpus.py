"""The GPUs of a second pool, written as plainly as possible: it scans everything, keeps no index and shares no rule with
the core. What is on each GPU, how much of it is taken, and which requests it would do for.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    asked_at: float = 0.0
    gpus: tuple[Key, ...] = ()
    state: str = "queued"
    since: float = 0.0
    how: str = ""
    granted_at: float = 0.0
    # When its grant was, on the clock of the readings.
    began: float = -float("inf")
    weight: int = 0
    fence: int = 0
    limit: float | None = None
    # How and when the pool has said that it will end it, and when it said so.
    ending: tuple[str, float] | None = None
    warned: float = 0.0
    # Whether its client has yet to take the grant up, and whether it did not do so in time.
    is_untaken: bool = False
    is_passed_over: bool = False

    @property
    def owner(self) -> str | None:
        return self.request.holder.owner  # type: ignore[no-any-return]

    @property
    def arrival(self) -> tuple[bool, int, int]:
        """The order of the queue, where all owners are alike."""
        return (self.request.preemptible, -self.request.priority, self.seq)


@dataclass
class PlainGpus:
    settings: Any
    now: float = -FOREVER
    lost_s: float = 0.0
    boot_ids: dict[str, str] = field(default_factory=dict)
    taken_over: float = 0.0
    epoch: int = 0
    announced: set[str] = field(default_factory=set)
    inventory: dict[Key, tuple[Any, ...]] = field(default_factory=dict)
    readings: dict[Key, Any] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    members: dict[tuple[Key, str], set[Any]] = field(default_factory=dict)
    excluded: set[Key] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    fences: dict[str, int] = field(default_factory=dict)

    @property
    def live(self) -> float:
        """The time by which leases expire: it stands still while the driver is away."""
        return self.now - self.lost_s

    # What is asked of it

    def on(self, key: Key) -> list[Lease]:
        found = [lease for lease in self.leases.values() if key in lease.gpus]
        return sorted(found, key=lambda lease: lease.fence)

    def lasts_s(self, lease: Lease) -> float:
        """How long a lease lasts without a heartbeat: an active one of a process that is watched, for ever. In a fleet
        its box counts.
        """
        is_watched = all(self.process_on(key, lease) for key in lease.gpus) or self.epoch > 0
        return FOREVER if lease.state == "active" and is_watched else float(lease.request.ttl_s)

    @staticmethod
    def process_on(key: Key, lease: Lease) -> Any:
        """The holder's process, if it runs on the node of this GPU."""
        holder = lease.request.holder
        return holder.process if holder.node in {None, key.node} else None

    def waiting(self) -> list[Lease]:
        """The waiters, in the order of their arrival."""
        return sorted((x for x in self.leases.values() if x.state == "queued"), key=lambda x: x.arrival)

    def are_enough(self, keys: Iterable[Key], wishes: Any) -> bool:
        """Whether as many nodes as are wished for have enough of these GPUs."""
        on_nodes = [key.node for key in keys]
        return bool(sum(on_nodes.count(node) >= wishes.gpus for node in set(on_nodes)) >= wishes.nodes)

    def is_mine(self, key: Key, lease: Lease, process: Any) -> bool:
        """Whether a process is a lease's: its nearest kin counts, and of leases with the same kin those not over."""
        for link in (process.id, *process.ancestors):
            kin = [other for other in self.on(key) if tuple(link) in self.roots(key, other)]
            if kin:
                return lease in ([other for other in kin if other.state != "draining"] or kin)
        return False

    def roots(self, key: Key, lease: Lease) -> set[Any]:
        process = self.process_on(key, lease)
        own = {tuple(process)} if process is not None else set()
        return own | self.members.get((key, lease.id), set())

    def outside_processes(self, key: Key) -> list[Any] | None:
        processes = self.readings[key].processes
        if processes is None:
            return None
        mine = {member for lease in self.on(key) for member in self.members.get((key, lease.id), set())}
        return [p for p in processes if tuple(p.id) not in mine and p.name not in self.ignored]

    def is_in_use_outside(self, key: Key) -> bool:
        """Whether a process outside the pool computes there or holds more than a context. Load beside a lease may be the
        lease's, and so may be a process where it is not known which are the lease's.
        """
        outside = self.outside_processes(key)
        if not outside or any(self.is_faceless(key, lease) for lease in self.on(key)):
            return False
        load = self.readings[key].utilization_percent
        is_computing = not self.on(key) and load is not None and load >= self.settings.computing_percent
        return bool(is_computing or sum(p.memory_mb for p in outside) > self.settings.context_mb)

    def is_faceless(self, key: Key, lease: Lease) -> bool:
        return self.process_on(key, lease) is None and not self.members.get((key, lease.id))

    def avoids_outsiders(self, wishes: Any) -> bool:
        asked = (wishes.memory_threshold_percent, wishes.utilization_threshold_percent)
        if wishes.memory_mb is not None or self.settings.outsiders == "thresholds":
            return False
        return bool(self.settings.outsiders == "avoid" or asked == (None, None))

    def memory(self, key: Key) -> tuple[dict[str, float], float]:
        """What counts for each lease, and what belongs to none. Every lease in the tests has a process whose memory is
        known, or none at all. Leases of one program share its processes, so what these hold is counted once; the first
        of them answers for what none of them asked for.
        """
        reading = self.readings[key]
        alike: dict[Any, list[Lease]] = {}
        for lease in self.on(key):
            members = frozenset(self.members.get((key, lease.id), set())) or frozenset({lease.id})
            alike.setdefault(members, []).append(lease)
        mine: dict[str, float] = {}
        explained = sum(p.memory_mb for p in reading.processes if p.name in self.ignored)
        for members, leases in alike.items():
            observed = sum(p.memory_mb for p in reading.processes if tuple(p.id) in members)
            asked = [lease.request.wishes.memory_mb or 0.0 for lease in leases]
            mine |= {lease.id: mb for lease, mb in zip(leases, asked, strict=True)}
            mine[leases[0].id] += max(observed - sum(asked), 0.0)
            explained += observed
        outside = float(max(reading.memory_used_mb - explained, 0.0))
        faceless = [
            x.id
            for x in self.on(key)
            if self.is_faceless(key, x) and x.request.wishes.memory_mb is None and x.began < reading.at
        ]
        if faceless:
            mine[faceless[0]] += outside
            outside = 0.0
        return mine, outside

    def committed(self, key: Key) -> float:
        mine, outside = self.memory(key)
        return sum(mine.values()) + outside

    def thresholds(self, wishes: Any) -> tuple[float, float]:
        memory, utilization = wishes.memory_threshold_percent, wishes.utilization_threshold_percent
        return (
            self.settings.thresholds.memory_percent if memory is None else memory,
            self.settings.thresholds.utilization_percent if utilization is None else utilization,
        )

    def has_place(self, others: Iterable[Lease], wishes: Any) -> bool:
        """Whether these leases on a GPU leave a place for such a request, memory aside."""
        others = list(others)
        if any(lease.state == "draining" for lease in others):
            return False
        if wishes.memory_mb is not None:
            is_for_sharing = all(lease.request.wishes.memory_mb is not None for lease in others)
            return bool(is_for_sharing and len(others) < self.settings.max_sharers)
        if any(lease.request.wishes.memory_mb is not None for lease in others):
            return False
        return not others

    def is_suitable(self, key: Key, wishes: Any) -> bool:
        """Whether a GPU could serve a request if no lease were on it."""
        reading = self.readings.get(key)
        if reading is None or reading.fault or reading.other_server or key in self.excluded:
            return False
        if self.now > reading.at + self.settings.stale_after_s:
            return False
        return self._fits(key, wishes)

    def is_usable(self, key: Key, wishes: Any) -> bool:
        if not self.is_suitable(key, wishes) or not self.has_place(self.on(key), wishes):
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
            if self.avoids_outsiders(wishes) and self.is_in_use_outside(key):
                return False
        return bool(reading.utilization_percent < utilization)

    def would_do(self, key: Key, wishes: Any, left: list[Lease]) -> bool:
        """Whether a GPU would do if of its leases only these were left. The load is taken for that of the others."""
        if not self.is_suitable(key, wishes) or not self.has_place(left, wishes):
            return False
        reading = self.readings[key]
        if reading.memory_used_mb is None or reading.utilization_percent is None:
            return False
        mine, outside = self.memory(key)
        used = sum(mine[lease.id] for lease in left) + outside
        limit = self.thresholds(wishes)[0] * reading.memory_total_mb / 100
        if wishes.memory_mb is not None:
            return bool(used + wishes.memory_mb <= limit)
        if self.avoids_outsiders(wishes) and self.is_in_use_outside(key):
            return False
        return bool(used < limit)

    def cost(self, key: Key, wishes: Any) -> tuple[float, float]:
        """What one GPU is chosen by: the least room left for a share, the least use for a whole one. No share breaks a
        whole GPU while it fits beside another.
        """
        reading = self.readings[key]
        if wishes.memory_mb is not None:
            room = float(self.thresholds(wishes)[0] * reading.memory_total_mb / 100 - self.committed(key))
            return (0.0 if self.on(key) else 1.0, room)
        ignored = sum(p.memory_mb for p in reading.processes if p.name in self.ignored)
        memory = 100 * max(reading.memory_used_mb - ignored, 0) / reading.memory_total_mb
        return (0.0, float(memory + reading.utilization_percent))

    def nodes(self) -> list[str]:
        return sorted({key.node for key in self.readings})

    def usable_on(self, node: str, wishes: Any, gone: set[Key]) -> list[Key]:
        return [k for k in self.readings if k.node == node and k not in gone and self.is_usable(k, wishes)]

    def is_used_by(self, key: Key, process: Any) -> bool:
        """Whether a GPU is in use outside, and by nothing but this process and its children."""
        is_measured = self.readings[key].utilization_percent is not None
        if self.settings.outsiders == "thresholds" or not is_measured or not self.is_in_use_outside(key):
            return False
        return all(process in (p.id, *p.ancestors) for p in self.outside_processes(key) or [])

    def has_enough(self, node: str, wishes: Any) -> bool:
        """Whether a node could serve a request if no lease were on its GPUs that work."""
        working = [
            key
            for key, reading in self.readings.items()
            if key.node == node
            and key not in self.excluded
            and not reading.fault
            and not reading.other_server
            and reading.memory_used_mb is not None
            and reading.utilization_percent is not None
            and self._fits(key, wishes)
            and (wishes.memory_mb or 0) <= self.thresholds(wishes)[0] * reading.memory_total_mb / 100
        ]
        return bool(len(working) >= wishes.gpus)

    def _fits(self, key: Key, wishes: Any) -> bool:
        reading = self.readings[key]
        is_large = (wishes.min_memory_mb or 0.0) * 0.93 <= reading.memory_total_mb
        is_named = self.is_among(key, wishes.among) and not self.is_left_out(key, wishes.exclude)
        return bool(
            is_large and is_named and self.is_of_model(reading.gpu.name, wishes) and wishes.node in {None, key.node}
        )

    @staticmethod
    def is_of_model(name: str, wishes: Any) -> bool:
        return wishes.model is None or any(model in name for model in wishes.model.split(","))

    def is_left_out(self, key: Key, names: tuple[str, ...] | None) -> bool:
        """Whether a GPU has one of these names, or its UUID begins with one."""
        index, uuid = str(self.inventory[key][0]), key.uuid.lower()
        whole = [other.uuid.lower() for other in self.inventory if other.node == key.node]
        return any(index == name or uuid == name.lower() for name in names or ()) or any(
            uuid.startswith(name.lower()) and name.lower() not in whole for name in names or () if not name.isdigit()
        )

    def is_among(self, key: Key, names: tuple[str, ...] | None) -> bool:
        """Whether a GPU goes by one of these names: its index, its UUID, or how no other UUID of its node begins."""
        if names is None or str(self.inventory[key][0]) in names:
            return True
        uuids = [other.uuid.lower() for other in self.inventory if other.node == key.node]
        alike = [[uuid for uuid in uuids if uuid.startswith(name.lower())] for name in names]
        return key.uuid.lower() in map(str.lower, names) or [key.uuid.lower()] in alike

    def could_do(self, key: Key, wishes: Any) -> bool:
        memory_mb = self.thresholds(wishes)[0] * self.readings[key].memory_total_mb / 100
        return self._fits(key, wishes) and (wishes.memory_mb or 0.0) <= memory_mb
