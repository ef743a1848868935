"""One sample of the visible GPUs, encoded once for all calls, and the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from statistics import fmean
from typing import Any

from gpu_worker_pool.core.model.gpu import Gpu, InventoryGpu, Reading
from gpu_worker_pool.host.pauses import Pauses
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.wire import statistics as wire
from gpu_worker_pool.wire.statistics import GpuHistory, GpuPast, HistoryPoint


@dataclass(frozen=True)
class Snapshot:
    """The visible GPUs at one time. `at` is on the clock for ages; `taken` is for people."""

    at: float
    taken: datetime
    readings: tuple[Reading, ...]
    source: str
    installed: int
    error: str | None = None

    @property
    def timestamp(self) -> str:
        """Local time without a zone, as documented."""
        return self.taken.isoformat(timespec="microseconds")

    @cached_property
    def stats(self) -> wire.GpuStatistics:
        gpus = tuple(_gpu(reading) for reading in self.readings)
        return wire.GpuStatistics(gpus=gpus, **self._common)

    @cached_property
    def stats_body(self) -> bytes:
        return encode(self.stats)

    @cached_property
    def count_body(self) -> bytes:
        return encode(wire.GpuCount(**self._common))

    @cached_property
    def summary_body(self) -> bytes:
        """The body of /gpu/summary. Totals are of the known values; null if none is known."""
        total_mb = _known(reading.memory_total_mb for reading in self.readings)
        used_mb = _known(reading.memory_used_mb for reading in self.readings)
        utilization = _known(reading.utilization_percent for reading in self.readings)
        unknown = None if self.readings else 0.0
        summary = wire.GpuSummary(
            total_memory_mb=round(sum(total_mb)) if total_mb or not self.readings else None,
            total_used_memory_mb=round(sum(used_mb)) if used_mb or not self.readings else None,
            total_memory_usage_percent=_percent(self.readings),
            average_utilization_percent=round(fmean(utilization), 2) if utilization else unknown,
            gpus_summary=tuple(map(_gpu_in_short, self.readings)),
            **self._common,
        )
        return encode(summary)

    @property
    def _common(self) -> dict[str, Any]:
        return {
            "gpu_count": len(self.readings),
            "timestamp": self.timestamp,
            "source": self.source,
            "error": self.error,
        }


def _gpu_in_short(reading: Reading) -> wire.GpuInShort:
    return wire.GpuInShort(
        gpu_id=reading.gpu.index,
        name=reading.gpu.name,
        memory_usage_percent=_rounded(reading.memory_percent, 2),
        utilization_percent=_rounded(reading.utilization_percent),
        uuid=reading.gpu.key.uuid,
        healthy=reading.fault is None,
    )


def _gpu(reading: Reading) -> wire.GpuDetail:
    total_mb, used_mb = _whole(reading.memory_total_mb), _whole(reading.memory_used_mb)
    return wire.GpuDetail(
        gpu_id=reading.gpu.index,
        name=reading.gpu.name,
        memory=wire.Memory(
            total_mb=total_mb,
            used_mb=used_mb,
            free_mb=None if total_mb is None or used_mb is None else max(total_mb - used_mb, 0),
            usage_percent=_rounded(reading.memory_percent, 2),
        ),
        utilization_percent=_whole(reading.utilization_percent),
        temperature_c=_whole(reading.temperature_c),
        power=wire.Power(draw_w=_rounded(reading.power_draw_w, 2), limit_w=_rounded(reading.power_limit_w, 2)),
        uuid=reading.gpu.key.uuid,
        healthy=reading.fault is None,
        error=reading.fault,
        processes=None
        if reading.processes is None
        else tuple(
            wire.ProcessOnGpu(pid=process.id.pid, name=process.name, used_mb=_whole(process.memory_mb))
            for process in reading.processes
        ),
    )


def _known(values: Any) -> list[float]:
    return [value for value in values if value is not None]


def _percent(readings: Sequence[Reading]) -> float | None:
    both = [
        (reading.memory_used_mb, reading.memory_total_mb)
        for reading in readings
        if reading.memory_used_mb is not None and reading.memory_total_mb
    ]
    total_mb = sum(total for _, total in both)
    return round(100.0 * sum(used for used, _ in both) / total_mb, 2) if total_mb else (None if readings else 0.0)


def _rounded(value: float | None, digits: int | None = None) -> float | None:
    return None if value is None else round(value, digits)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def as_installed(reading: Reading) -> InventoryGpu:
    return InventoryGpu(reading.gpu.key.uuid, reading.gpu.index, reading.gpu.name, reading.memory_total_mb)


def encode_readings(snapshots: Sequence[Snapshot], latest: Snapshot, max_history: int) -> bytes:
    """Encode `/gpu/history`: the snapshots, grouped by GPU. It takes a while with many snapshots: call it in a thread."""
    pauses = Pauses()
    first: dict[str, Gpu] = {}
    points: dict[str, list[HistoryPoint]] = {}
    for snapshot in snapshots:
        for reading, shown in zip(snapshot.readings, snapshot.stats.gpus, strict=True):
            uuid = first.setdefault(reading.gpu.key.uuid, reading.gpu).key.uuid
            points.setdefault(uuid, []).append(
                HistoryPoint(
                    timestamp=snapshot.timestamp,
                    memory_usage_percent=shown.memory.usage_percent,
                    utilization_percent=shown.utilization_percent,
                    temperature_c=shown.temperature_c,
                    power_draw_w=shown.power.draw_w,
                )
            )
        pauses.yield_if_due()
    gpus = []
    for gpu in sorted(first.values(), key=lambda gpu: gpu.index):
        uuid = gpu.key.uuid
        gpus.append(GpuPast(gpu_id=gpu.index, uuid=uuid, name=gpu.name, readings=tuple(points[uuid])))
        pauses.yield_if_due()
    return encode(
        GpuHistory(max_history=max_history, gpus=tuple(gpus), timestamp=latest.timestamp, source=latest.source)
    )
