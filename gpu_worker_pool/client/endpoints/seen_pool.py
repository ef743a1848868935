"""What an endpoint last showed of its GPUs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.wire.pool import PoolGlance
from gpu_worker_pool.wire.reader import has_all, read
from gpu_worker_pool.wire.statistics import GpuStatistics, GpuSummary

MOST_GPUS = 4096
MOST_GPUS_OF_A_FLEET = 100_000
BodyT = TypeVar("BodyT")

# A GPU's UUID, and the worker that was granted it or released it.
Change = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """One GPU; unknown is None."""

    index: int
    uuid: str
    name: str
    is_free: bool
    memory_percent: float | None
    utilization_percent: float | None
    workers: tuple[str, ...] = ()
    node: str | None = None


@dataclass(frozen=True, slots=True)
class SeenPool:
    """All GPUs of an endpoint, or of a fleet, and the requests that wait there: the first by the ids of their leases, and
    how many in all. `active` are the ids of leases that have GPUs. `seen_at` is when it was asked; `server_id` tells one
    server from another, whatever names it goes by, and `pool_id` one journal from another. A server `is_in_fleet` whose
    `fleet_id` is None does not know its fleet yet.
    """

    gpus: tuple[SeenGpu, ...] = ()
    queued: tuple[str, ...] = ()
    queue_length: int = 0
    seen_at: float = -math.inf
    server_id: str | None = None
    pool_id: str | None = None
    node: str | None = None
    is_in_fleet: bool = False
    fleet_id: str | None = None
    active: tuple[str, ...] = ()

    @property
    def available(self) -> int:
        return sum(gpu.is_free for gpu in self.gpus)

    def with_changes(self, taken: Collection[Change], released: Collection[Change]) -> SeenPool:
        """The same, with what this process was granted and released since then."""
        gpus = []
        for gpu in self.gpus:
            gone = {worker for worker in gpu.workers if (gpu.uuid, worker) in released}
            came = [worker for uuid, worker in taken if uuid == gpu.uuid and worker not in gpu.workers]
            workers = (*(worker for worker in gpu.workers if worker not in gone), *came)
            is_free = not came and (gpu.is_free or (bool(gone) and not workers))
            gpus.append(replace(gpu, workers=workers, is_free=is_free))
        return replace(self, gpus=tuple(gpus))


@dataclass
class CurrentView:
    """What was seen last, and what this process was granted and released since, each with when."""

    seen: SeenPool = field(default_factory=SeenPool)
    _taken: dict[Change, float] = field(default_factory=dict)
    _released: dict[Change, float] = field(default_factory=dict)

    def gpus(self) -> SeenPool:
        """The GPUs, with the changes that this process made since they were seen."""
        return self.seen.with_changes(self._taken.copy(), self._released.copy())

    def note_taken(self, uuid: str, worker_id: str) -> None:
        self._released.pop((uuid, worker_id), None)  # by the same worker, before
        self._taken[uuid, worker_id] = boot_time()

    def note_released(self, uuid: str, worker_id: str) -> None:
        self._taken.pop((uuid, worker_id), None)
        self._released[uuid, worker_id] = boot_time()

    def show(self, seen: SeenPool) -> None:
        """Take in what a poll showed; it includes the changes that this process made before."""
        self.seen = seen
        for changes in (self._taken, self._released):
            for change, at in changes.copy().items():
                if at < seen.seen_at:
                    changes.pop(change, None)


def parse_pool(data: object, seen_at: float, most_gpus: int = MOST_GPUS) -> SeenPool:
    """From /pool of a server with leases; ValueError where it is something else."""
    pool = _read(PoolGlance, data, "gpus", also=("leases", "queue"), most_gpus=most_gpus)
    workers: dict[str, list[str]] = {}
    for lease in pool.leases:
        if lease.state == "active" and not lease.gpus:
            raise ValueError("it shows an active lease without GPUs; is this a GPU statistics server?")
        for gpu in lease.gpus if lease.state == "active" else ():
            workers.setdefault(gpu.uuid, []).append(lease.worker_id or lease.owner or lease.id)
    gpus = tuple(
        SeenGpu(
            _index(gpu.gpu_id),
            gpu.uuid,
            gpu.name or "",
            gpu.state == "free" and pool.can_grant is not False,
            100.0 * gpu.memory_used_mb / gpu.memory_total_mb
            if gpu.memory_total_mb and gpu.memory_used_mb is not None
            else None,
            gpu.utilization_percent,
            tuple(workers.get(gpu.uuid, ())),
            gpu.node,
        )
        for gpu in pool.gpus
    )
    queued, fleet = tuple(lease.id for lease in pool.queue), pool.fleet
    return SeenPool(
        gpus,
        queued,
        max(pool.queue_length or 0, len(queued)),
        seen_at,
        pool.server_id,
        pool.pool_id,
        pool.node,
        is_in_fleet=fleet is not None,
        fleet_id=None if fleet is None else fleet.id,
        active=tuple(lease.id for lease in pool.leases if lease.state == "active"),
    )


def parse_summary(data: object, node: str, at: float, totals_mb: Mapping[int, float]) -> list[Reading]:
    """Readings from /gpu/summary; ValueError where it is something else."""
    readings = []
    for gpu in _read(GpuSummary, data, "gpus_summary").gpus_summary:
        index, percent = _index(gpu.gpu_id), gpu.memory_usage_percent
        total_mb = totals_mb.get(index)
        readings.append(
            Reading(
                Gpu(GpuKey(node, f"index-{index}" if gpu.uuid is None else gpu.uuid), index, gpu.name or ""),
                at,
                memory_total_mb=total_mb,
                memory_used_mb=None if total_mb is None or percent is None else total_mb * percent / 100,
                utilization_percent=gpu.utilization_percent,
                fault=None if gpu.healthy else "the server calls it unhealthy",
                reported_memory_percent=percent,
            )
        )
    return readings


def parse_sizes(data: object) -> dict[int, float]:
    """How much memory each GPU has, from /gpu/stats; what is not there is left out."""
    sizes = {gpu.gpu_id: gpu.memory.total_mb for gpu in _read(GpuStatistics, data, "gpus").gpus}
    return {index: float(total_mb) for index, total_mb in sizes.items() if total_mb is not None and total_mb > 0}


def _read(kind: type[BodyT], data: object, gpus: str, also: tuple[str, ...] = (), most_gpus: int = MOST_GPUS) -> BodyT:
    """The body with all of its GPUs; of the other lists, what can be read: a newer server may say more than we know."""
    body = read(kind, data)
    has_lists = isinstance(data, dict) and all(isinstance(data.get(name), list) for name in also)
    if body is None or not has_lists or not has_all(body, data, gpus):
        raise ValueError(f"its answer shows no {gpus}; is this a GPU statistics server?")
    number = len(getattr(body, gpus))
    if number > most_gpus:
        raise ValueError(f"it shows {number} GPUs, more than one machine has")
    return body


def _index(index: int | None) -> int:
    if index is None or not 0 <= index < 2**31:
        raise ValueError(f"gpu_id is {index!r}, which is not an index of a GPU")
    return index
