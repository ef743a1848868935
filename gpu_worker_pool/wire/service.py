"""Bodies about the server itself, and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error (RFC 9457). `detail` says what is wrong and what to do."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowersProblem(Problem):
    """The error of a server that does not lead its fleet; `leader` is the URL of the one that does."""

    leader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The fleet that a server belongs to, as far as it knows. `id` is that of the pool. `leader` and `leader_url` are null
    while nobody is known to lead. An agent cannot lead. `lag_s` is how old the state is that this server shows; null: it has
    none yet. `trouble` says why this server could not take over; null if it could.
    """

    id: str | None
    role: Literal["leader", "follower", "agent"]
    epoch: int | None
    leader: str | None
    leader_url: str | None
    lag_s: float | None
    trouble: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The calls of this server."""

    message: str | None = None
    version: str | None = None
    endpoints: Mapping[str, str]
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The health of the server; `degraded` has a reason."""

    status: Literal["healthy", "degraded"]
    nvidia_smi_available: bool
    timestamp: str
    reason: str | None
    source: str
    gpu_count: int
    reading_age_s: float
    can_grant: bool
    fleet: FleetView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """A positive answer to a probe."""

    status: Literal["alive", "ready"]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPart:
    """The settings of the process. `socket` is the path of its Unix socket; null if it has none."""

    host: str
    port: int
    reload: bool
    log_level: str
    access_log: bool
    workers: int
    socket: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPart:
    """The settings of the API."""

    title: str
    version: str
    docs_url: str
    redoc_url: str
    enable_cors: bool
    api_prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoringPart:
    """How the GPUs are sampled."""

    refresh_interval: float
    max_history: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteringPart:
    """The filter of GPUs."""

    cuda_visible_devices: str | None
    visible_gpu_ids: tuple[int, ...]
    filtering_active: bool
    total_system_gpus: int
    visible_gpu_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The settings in force; none of them is secret."""

    server: ServerPart
    api: ApiPart
    monitoring: MonitoringPart
    gpu_filtering: FilteringPart
