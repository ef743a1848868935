"""Bodies of `/pool`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .leases import DrainingLeaseView, LeaseView, VerdictView
from .plans import BookingView, GroupView, ReservationView
from .service import FleetView

GpuState = Literal[
    "free", "leased", "shared", "draining", "out_of_service", "unhealthy", "unknown", "busy", "outside", "held"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProcess:
    """A process on a GPU and its leases. `is_outside` is null if it is unknown whether it belongs to a lease."""

    pid: int
    name: str | None = None
    user: str | None = None
    used_mb: float | None = None
    lease_ids: tuple[str, ...] = ()
    is_outside: bool | None = None
    is_ignored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGpu:
    """A GPU with its state and the reason."""

    node: str | None = None
    gpu_id: int | None = None
    uuid: str
    name: str | None = None
    state: GpuState = "unknown"
    reason: str | None = None
    verdict: VerdictView | None = None
    leases: tuple[str, ...] = ()
    is_out_of_service: bool = False
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    memory_committed_mb: float | None = None
    memory_outside_mb: float | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_draw_w: float | None = None
    processes: tuple[PoolProcess, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingGpu:
    """A GPU that is out of service and was removed."""

    node: str
    uuid: str
    state: Literal["unknown"] = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdsView:
    """A GPU at or over one of these is not granted."""

    memory_percent: float | None = None
    utilization_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """The node at a glance. `server_id` identifies the server until it restarts, `pool_id` its journal, `machine` the
    machine.

    `reservation` is that of the first waiter that cannot be served. Bookings without an owner are planned drains.
    """

    node: str | None = None
    gpus: tuple[PoolGpu, ...]
    thresholds: ThresholdsView = ThresholdsView()
    queue_length: int | None = None
    server_id: str | None = None
    pool_id: str | None = None
    machine: str | None = None
    ignored_processes: tuple[str, ...] = ()
    can_grant: bool | None = True
    trouble: str | None = None
    now: str | None = None
    timestamp: str | None = None
    source: str | None = None
    leases: tuple[LeaseView | DrainingLeaseView, ...] = ()
    queue: tuple[LeaseView, ...] = ()
    reservation: ReservationView | None = None
    bookings: tuple[BookingView, ...] = ()
    fleet: FleetView | None = None
    groups: tuple[GroupView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredProcesses:
    """Processes of these names do not count as use from outside the pool."""

    ignored_processes: tuple[str, ...]
