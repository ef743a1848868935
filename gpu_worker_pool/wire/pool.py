"""Bodies of `/pool`, of the page's calls and about a fleet: its boxes, and what boxes say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .leases import DrainingLeaseView, GpuRef, LeaseView, RenewAnswer, VerdictView
from .plans import BookingView, ForecastView, GroupView, ReservationView
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


# What a box is asked on its link to renew leases that it keeps.
RENEW_AT_BOX = "renew"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxView:
    """A box of the fleet. Its state is `unknown` while the leader does not hear from it: then nothing is granted there,
    and its leases go on. `url`, `version` and `is_candidate` are null until it has announced itself to this leader. `trouble`
    is why it cannot keep leases, in a sentence: then nothing is granted there either.
    """

    node: str
    url: str | None = None
    state: Literal["up", "unknown"] = "unknown"
    version: str | None = None
    is_candidate: bool | None = None
    is_leader: bool = False
    heard_ago_s: float | None = None
    trouble: str | None = None
    gpus: int = 0
    leases: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetList:
    """The fleet, as its leader knows it. `leader` is the node of the box that leads, `id` that of the pool."""

    id: str | None
    epoch: int | None
    leader: str | None
    boxes: tuple[BoxView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRenewForm:
    """Leases to renew at the box that keeps them, for a caller that another box knows."""

    ids: tuple[str, ...]
    wait_s: float = 0.0
    warned: tuple[str, ...] = ()
    caller: str | None = None
    is_local: bool = False
    is_admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRenewAnswer(RenewAnswer):
    """`elsewhere` are leases that this box does not keep; `denied` those that the caller may not renew."""

    elsewhere: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()


RecentKind = Literal["queued", "granted", "warned", "ended", "drained", "out_of_service", "in_service"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentEvent:
    """An event that people are told of. `label` is the lease's label `command`."""

    at: str | None
    kind: RecentKind
    lease_id: str | None
    owner: str | None
    worker_id: str | None
    label: str | None
    gpus: tuple[GpuRef, ...]
    reason: str | None
    by: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedEnd:
    """Until when a lease is predicted to last."""

    lease_id: str
    at: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """The pool and the page's other data. `boxes` is null unless the whole fleet is shown. `advice` says why the GPUs could not be
    read, and what to do. `ends` are those of leases without a time limit.
    """

    pool: PoolView
    now: str | None
    started_at: str | None
    measured_at: float
    reading_age_s: float | None
    stale_after_s: float
    refresh_interval_s: float
    max_history: int
    advice: str | None
    ends: tuple[ExpectedEnd, ...]
    forecast: ForecastView
    happened: tuple[RecentEvent, ...]
    has_tokens: bool
    title: str
    docs: str | None
    boxes: tuple[BoxView, ...] | None = None
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeView:
    """Who calls: the name of its token, or its Unix user."""

    name: str | None
    is_admin: bool
    role: str = "user"
