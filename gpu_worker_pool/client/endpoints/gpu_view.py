"""What an endpoint last showed of its GPUs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading

MOST_GPUS = 4096
MOST = 1e15


# A GPU's UUID, and the worker who was granted it or gave it back.
Change = tuple[str, str]


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU; unknown is None."""

    index: int
    uuid: str
    name: str
    is_free: bool
    memory_percent: float | None
    utilization_percent: float | None
    workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolView:
    """All GPUs of an endpoint, and who waits there: the first of them by the ids of their leases, and how many in all.
    `seen_at` is when it was asked; `server_id` tells one server from another, whatever names it goes by.
    """

    gpus: tuple[GpuView, ...] = ()
    queued: tuple[str, ...] = ()
    queue_length: int = 0
    seen_at: float = -math.inf
    server_id: str | None = None

    @property
    def available(self) -> int:
        """How many GPUs are free."""
        return sum(gpu.is_free for gpu in self.gpus)

    def with_changes(self, taken: Collection[Change], released: Collection[Change]) -> PoolView:
        """With what this process has been granted and given back since then."""
        gpus = []
        for gpu in self.gpus:
            gone = {worker for uuid, worker in released if uuid == gpu.uuid and worker in gpu.workers}
            came = [worker for uuid, worker in taken if uuid == gpu.uuid and worker not in gpu.workers]
            workers = (*(worker for worker in gpu.workers if worker not in gone), *came)
            is_free = not came and (gpu.is_free or (bool(gone) and not workers))
            gpus.append(replace(gpu, workers=workers, is_free=is_free))
        return replace(self, gpus=tuple(gpus))


def parse_pool(data: Any, seen_at: float) -> PoolView:
    """From /pool of a server with leases; ValueError where it is something else."""
    items = _gpus(data, "gpus")
    workers: dict[str, list[str]] = {}
    for lease in _list(data, "leases"):
        if isinstance(lease, dict) and lease.get("state") == "active":
            for gpu in _gpus(lease, "gpus"):
                workers.setdefault(str(gpu.get("uuid")), []).append(_worker(lease))
    queue = [str(lease.get("id")) for lease in _list(data, "queue") if isinstance(lease, dict)]
    length = data.get("queue_length")
    gpus = []
    for item in items:
        total, used = _number(item.get("memory_total_mb")), _number(item.get("memory_used_mb"))
        uuid = str(item.get("uuid"))
        gpus.append(
            GpuView(
                _index(item),
                uuid,
                str(item.get("name") or ""),
                item.get("state") == "free" and bool(data.get("can_grant", True)),
                100.0 * used / total if total and used is not None else None,
                _number(item.get("utilization_percent")),
                tuple(workers.get(uuid, ())),
            )
        )
    length = length if isinstance(length, int) and len(queue) <= length < 2**31 else len(queue)
    server_id = data.get("server_id")
    return PoolView(tuple(gpus), tuple(queue), length, seen_at, server_id if isinstance(server_id, str) else None)


def parse_summary(data: Any, node: str, at: float, totals_mb: Mapping[int, float]) -> list[Reading]:
    """Readings from /gpu/summary; ValueError where it is something else."""
    readings = []
    for item in _gpus(data, "gpus_summary"):
        index = _index(item)
        uuid = item.get("uuid")
        percent = _number(item.get("memory_usage_percent"))
        total_mb = totals_mb.get(index)
        readings.append(
            Reading(
                Gpu(
                    GpuKey(node, uuid if isinstance(uuid, str) else f"index-{index}"),
                    index,
                    str(item.get("name") or ""),
                ),
                at,
                memory_total_mb=total_mb,
                memory_used_mb=None if total_mb is None or percent is None else total_mb * percent / 100,
                utilization_percent=_number(item.get("utilization_percent")),
                fault=None if item.get("healthy", True) else "the server calls it unhealthy",
                reported_memory_percent=percent,
            )
        )
    return readings


def parse_sizes(data: Any) -> dict[int, float]:
    """How much memory each GPU has, from /gpu/stats; what is not there is left out."""
    sizes: dict[int, float] = {}
    for item in _gpus(data, "gpus"):
        memory = item.get("memory")
        total_mb = _number(memory.get("total_mb")) if isinstance(memory, dict) else None
        if total_mb is not None and total_mb > 0:
            sizes[_index(item)] = total_mb
    return sizes


def _gpus(data: Any, key: str) -> list[dict[str, Any]]:
    found = _list(data, key)
    if len(found) > MOST_GPUS:
        raise ValueError(f"it shows {len(found)} GPUs, which nobody has in one box")
    if not all(isinstance(item, dict) for item in found):
        raise ValueError(f"its {key} are no GPUs")
    return found


def _list(data: Any, key: str) -> list[Any]:
    found = data.get(key) if isinstance(data, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"its answer has no {key}; is this a GPU statistics server?")  # noqa: TRY004 - a fault of its
    return found


def _index(item: Mapping[str, Any]) -> int:
    index = item.get("gpu_id")
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 2**31:
        raise ValueError(f"gpu_id is {index!r}, which is no index of a GPU")
    return index


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not abs(value) < MOST:
        raise ValueError("it shows a number that nothing can measure")
    return float(value)


def _worker(lease: Mapping[str, Any]) -> str:
    return str(lease.get("worker_id") or lease.get("owner") or lease.get("id") or "an unnamed holder")
