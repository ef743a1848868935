"""The shape of every answer, for the interactive documentation. The answers themselves are encoded once a reading."""

from __future__ import annotations

from pydantic import BaseModel


class Memory(BaseModel):
    """Memory of one GPU; null is unknown."""

    total_mb: int | None
    used_mb: int | None
    free_mb: int | None
    usage_percent: float | None


class Power(BaseModel):
    """Power of one GPU; null is unknown."""

    draw_w: float | None
    limit_w: float | None


class GpuProcessInfo(BaseModel):
    """A process that holds memory on a GPU."""

    pid: int
    name: str | None
    used_mb: int | None


class GpuDetail(BaseModel):
    """One GPU."""

    gpu_id: int
    name: str
    memory: Memory
    utilization_percent: int | None
    temperature_c: int | None
    power: Power
    uuid: str
    healthy: bool
    error: str | None
    processes: list[GpuProcessInfo] | None


class GpuCount(BaseModel):
    """How many GPUs. `error` says why there are none, or what is wrong with the reading."""

    gpu_count: int
    timestamp: str
    source: str
    error: str | None


class GpuStatistics(GpuCount):
    """All GPUs in detail."""

    gpus: list[GpuDetail]


class GpuSummaryItem(BaseModel):
    """One GPU in short."""

    gpu_id: int
    name: str
    memory_usage_percent: float | None
    utilization_percent: int | None
    uuid: str
    healthy: bool


class GpuSummary(GpuCount):
    """All GPUs in short, with totals of what is known."""

    total_memory_mb: int | None
    total_used_memory_mb: int | None
    total_memory_usage_percent: float | None
    average_utilization_percent: float | None
    gpus_summary: list[GpuSummaryItem]


class HistoryPoint(BaseModel):
    """One past reading of one GPU."""

    timestamp: str
    memory_usage_percent: float | None
    utilization_percent: int | None
    temperature_c: int | None
    power_draw_w: float | None


class GpuHistoryItem(BaseModel):
    """The past readings of one GPU, oldest first."""

    gpu_id: int
    uuid: str
    name: str
    readings: list[HistoryPoint]


class GpuHistory(BaseModel):
    """The last MAX_HISTORY readings, by GPU."""

    max_history: int
    gpus: list[GpuHistoryItem]
    timestamp: str
    source: str


class Health(BaseModel):
    """`degraded` comes with a reason."""

    status: str
    nvidia_smi_available: bool
    timestamp: str
    reason: str | None
    source: str
    gpu_count: int
    reading_age_s: float
    can_grant: bool


class Home(BaseModel):
    """What there is."""

    message: str
    version: str
    endpoints: dict[str, str]
    source: str


class ServerPart(BaseModel):
    """How the server was started."""

    host: str
    port: int
    reload: bool
    log_level: str
    access_log: bool
    workers: int


class ApiPart(BaseModel):
    """How the API was set up."""

    title: str
    version: str
    docs_url: str
    redoc_url: str
    enable_cors: bool
    api_prefix: str


class MonitoringPart(BaseModel):
    """How the GPUs are looked at."""

    refresh_interval: float
    max_history: int
    source: str


class FilteringPart(BaseModel):
    """Which GPUs are shown."""

    cuda_visible_devices: str | None
    visible_gpu_ids: list[int]
    filtering_active: bool
    total_system_gpus: int
    visible_gpu_count: int


class Configuration(BaseModel):
    """The settings in force."""

    server: ServerPart
    api: ApiPart
    monitoring: MonitoringPart
    gpu_filtering: FilteringPart


class Alive(BaseModel):
    """Yes."""

    status: str
    source: str
