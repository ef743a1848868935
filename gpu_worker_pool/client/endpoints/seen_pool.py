"""What an endpoint last showed of its GPUs."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import has_all, read

MOST_GPUS = 4096
MOST_GPUS_OF_A_FLEET = 100_000
BodyT = TypeVar("BodyT")


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """One GPU; unknown is None. `workers` are those that have it, by the ids of their leases."""

    index: int
    uuid: str
    name: str
    is_free: bool
    memory_percent: float | None
    utilization_percent: float | None
    workers: Mapping[str, str] = field(default_factory=dict)
    node: str | None = None


@dataclass(frozen=True, slots=True)
class SeenPool:
    """All GPUs of an endpoint, or of a fleet, and the requests that wait there: the first by the ids of their leases, and
    how many in all. `seen_at` is when it was asked, and `view` the answer. A server `is_in_fleet` whose `fleet_id` is None does
    not know its fleet yet.
    """

    gpus: tuple[SeenGpu, ...] = ()
    queued: tuple[str, ...] = ()
    queue_length: int = 0
    seen_at: float = -math.inf
    view: PoolView | None = None

    @property
    def node(self) -> str | None:
        return None if self.view is None else self.view.node

    @property
    def is_in_fleet(self) -> bool:
        return self.view is not None and self.view.fleet is not None

    @property
    def fleet_id(self) -> str | None:
        return None if self.view is None or self.view.fleet is None else self.view.fleet.id

    @property
    def available(self) -> int:
        return sum(gpu.is_free for gpu in self.gpus)

    def with_own(self, held: Mapping[str, Mapping[str, str]], ended: Container[str]) -> SeenPool:
        """The same with this client's own changes since: `held` has its workers by GPU and lease, `ended` the leases that
        it has no more.
        """
        gpus = []
        for gpu in self.gpus:
            own = {
                lease_id: worker for lease_id, worker in held.get(gpu.uuid, {}).items() if lease_id not in gpu.workers
            }
            left = {lease_id: worker for lease_id, worker in gpu.workers.items() if lease_id not in ended}
            is_free = not own and (gpu.is_free or (not left and bool(gpu.workers)))
            gpus.append(replace(gpu, workers=left | own, is_free=is_free))
        return replace(self, gpus=tuple(gpus))


def parse_pool(data: object, seen_at: float, most_gpus: int = MOST_GPUS) -> SeenPool:
    """From /pool of a server with leases; ValueError where it is something else."""
    pool = read_all(PoolView, data, "gpus", also=("leases", "queue"), most_gpus=most_gpus)
    workers: dict[str, dict[str, str]] = {}
    for lease in pool.leases:
        if lease.state == "active" and not lease.gpus:
            raise ValueError("it shows an active lease without GPUs; is this a GPU statistics server?")
        for gpu in lease.gpus if lease.state == "active" else ():
            workers.setdefault(gpu.uuid, {})[lease.id] = lease.worker_id or lease.owner or lease.id
    gpus = tuple(
        SeenGpu(
            gpu_index(gpu.gpu_id),
            gpu.uuid,
            gpu.name or "",
            gpu.state == "free" and pool.can_grant is not False,
            100.0 * gpu.memory_used_mb / gpu.memory_total_mb
            if gpu.memory_total_mb and gpu.memory_used_mb is not None
            else None,
            gpu.utilization_percent,
            workers.get(gpu.uuid, {}),
            gpu.node,
        )
        for gpu in pool.gpus
    )
    queued = tuple(lease.id for lease in pool.queue)
    return SeenPool(gpus, queued, max(pool.queue_length or 0, len(queued)), seen_at, pool)


def read_all(
    kind: type[BodyT], data: object, gpus: str, also: tuple[str, ...] = (), most_gpus: int = MOST_GPUS
) -> BodyT:
    """The body with all of its GPUs; of the other lists, what can be read: a newer server may say more than we know."""
    body = read(kind, data)
    has_lists = isinstance(data, dict) and all(isinstance(data.get(name), list) for name in also)
    if body is None or not has_lists or not has_all(body, data, gpus):
        raise ValueError("its answer shows no GPUs; is this a GPU statistics server?")
    number = len(getattr(body, gpus))
    if number > most_gpus:
        raise ValueError(f"it shows {number} GPUs, more than one machine has")
    return body


def gpu_index(index: int | None) -> int:
    if index is None or not 0 <= index < 2**31:
        raise ValueError(f"gpu_id is {index!r}, which is not an index of a GPU")
    return index
