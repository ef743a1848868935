"""Bodies of the statistics calls. Unknown is null."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one GPU."""

    total_mb: int | None = None
    used_mb: int | None = None
    free_mb: int | None = None
    usage_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power of one GPU."""

    draw_w: float | None = None
    limit_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOnGpu:
    """A process that holds memory on a GPU."""

    pid: int
    name: str | None = None
    used_mb: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDetail:
    """One GPU."""

    gpu_id: int
    name: str | None = None
    memory: Memory = Memory()
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power: Power = Power()
    uuid: str | None = None
    healthy: bool = True
    error: str | None = None
    processes: tuple[ProcessOnGpu, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatistics:
    """All GPUs in detail. `error` says why there are none, or what is wrong with the reading."""

    gpu_count: int | None = None
    gpus: tuple[GpuDetail, ...]
    timestamp: str | None = None
    source: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCount:
    """The number of GPUs."""

    gpu_count: int
    timestamp: str
    source: str
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInShort:
    """One GPU in brief."""

    gpu_id: int
    name: str | None = None
    memory_usage_percent: float | None = None
    utilization_percent: float | None = None
    uuid: str | None = None
    healthy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSummary:
    """All GPUs in brief, with totals of the known values."""

    gpu_count: int | None = None
    total_memory_mb: int | None = None
    total_used_memory_mb: int | None = None
    total_memory_usage_percent: float | None = None
    average_utilization_percent: float | None = None
    gpus_summary: tuple[GpuInShort, ...]
    timestamp: str | None = None
    source: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """One past reading of one GPU."""

    timestamp: str
    memory_usage_percent: float | None
    utilization_percent: int | None
    temperature_c: int | None
    power_draw_w: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPast:
    """The past readings of one GPU, oldest first."""

    gpu_id: int
    uuid: str
    name: str
    readings: tuple[HistoryPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHistory:
    """The last MAX_HISTORY readings, by GPU."""

    max_history: int
    gpus: tuple[GpuPast, ...]
    timestamp: str
    source: str
