"""What the client returns to its user: GPUs, assignments, and the state of the pool. Unknown readings are None."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from .notices import EndNotice, Loss

MAX_MEMORY_MB = 1e12
MAX_TEXT = 256

GpuId = int | str
"""The index with a single endpoint, or the global id (`server1:2`) with several."""


@dataclass(frozen=True)
class LeaseEnding:
    """The server will end the lease: the reason (`time_limit`, `preempted` or `idle`), and when, in local time."""

    reason: str
    ends_at: datetime


@dataclass(kw_only=True)
class LeaseFacts:
    """The lease behind an assignment. It is not part of how an assignment compares and prints: the documents show those.

    `lost` is set when the holder has lost the GPU, `warned` while the server is about to end the lease. They work in this
    process only: an assignment that was pickled for another process knows there whether it was lost already, but learns
    of no later loss or warning. `ends_at` is when the time limit of the lease ends it, in local time; None: it has none.
    """

    lease_id: str | None = field(default=None, compare=False, repr=False)
    fence: int | None = field(default=None, compare=False, repr=False)
    gpu_ids: tuple[GpuId, ...] = field(default=(), compare=False, repr=False)
    uuids: tuple[str, ...] = field(default=(), compare=False, repr=False)
    # The node of each of `uuids`; empty where it is not known.
    nodes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    # Of a share of GPUs, the memory of each; None: the GPUs are whole.
    memory_mb: float | None = field(default=None, compare=False, repr=False)
    # The URL of the server that granted it; None where this process decides by itself.
    server_url: str | None = field(default=None, compare=False, repr=False)
    env: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    # The environment on each node of a fleet, where the GPUs are on several; `env` is that of the first.
    node_envs: Mapping[str, Mapping[str, str]] = field(default_factory=dict, compare=False, repr=False)
    lost: Loss | None = field(default=None, compare=False, repr=False)
    warned: EndNotice | None = field(default=None, compare=False, repr=False)
    ends_at: datetime | None = field(default=None, compare=False, repr=False)

    @property
    def ending(self) -> LeaseEnding | None:
        """Why and when the server will end the lease; None while it is not about to."""
        return None if self.warned is None else self.warned.ending

    @property
    def is_lost(self) -> bool:
        """Whether the GPU must not be used any more."""
        return self.lost is not None and self.lost.is_set()

    def __getstate__(self) -> dict[str, Any]:
        # An event belongs to its event loop, and a mapping may be a read-only view: neither can be pickled.
        lost = self.lost.for_another_process() if self.lost is not None else None
        return {**self.__dict__, "lost": lost, "warned": None, "env": dict(self.env)}

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        # A copy is of the same lease, so it must learn of its loss too.
        return self.__copy__()


@dataclass
class GPUInfo:
    """One GPU as it was last read."""

    gpu_id: int
    name: str
    memory_usage_percent: float | None
    utilization_percent: float | None

    def __post_init__(self) -> None:
        _check_count("gpu_id", self.gpu_id)
        _check_text("name", self.name)
        _check_number("memory_usage_percent", self.memory_usage_percent, 100)
        _check_number("utilization_percent", self.utilization_percent, 100)


@dataclass
class GPUStats:
    """All GPUs of one endpoint, as `/gpu/summary` shows them."""

    gpu_count: int
    total_memory_mb: float | None
    total_used_memory_mb: float | None
    total_memory_usage_percent: float | None
    average_utilization_percent: float | None
    gpus_summary: list[GPUInfo]
    timestamp: str | None = None

    def __post_init__(self) -> None:
        _check_count("gpu_count", self.gpu_count)
        _check_number("total_memory_mb", self.total_memory_mb, MAX_MEMORY_MB)
        _check_number("total_used_memory_mb", self.total_used_memory_mb, MAX_MEMORY_MB)
        _check_number("total_memory_usage_percent", self.total_memory_usage_percent, 100)
        _check_number("average_utilization_percent", self.average_utilization_percent, 100)
        if self.timestamp is not None:
            _check_text("timestamp", self.timestamp)
        if self.gpu_count != len(self.gpus_summary):
            raise ValueError(f"gpu_count is {self.gpu_count}, but gpus_summary has {len(self.gpus_summary)} GPUs")
        if len({gpu.gpu_id for gpu in self.gpus_summary}) != len(self.gpus_summary):
            raise ValueError("gpus_summary has the same gpu_id twice")


@dataclass
class GlobalGPUInfo:
    """One GPU among those of several endpoints."""

    global_gpu_id: str
    endpoint_id: str
    local_gpu_id: int
    name: str
    memory_usage_percent: float | None
    utilization_percent: float | None
    is_available: bool

    def __post_init__(self) -> None:
        _check_global_id(self.global_gpu_id, self.endpoint_id, self.local_gpu_id)
        _check_text("name", self.name)
        _check_number("memory_usage_percent", self.memory_usage_percent, 100)
        _check_number("utilization_percent", self.utilization_percent, 100)


@dataclass
class WorkerInfo:
    """A worker that has a GPU or waits for one."""

    worker_id: str
    enqueued_at: datetime | None = None

    def __post_init__(self) -> None:
        _check_id("worker_id", self.worker_id)


# Hashed by the compared fields, for sets and keys; do not change those fields then.
@dataclass(unsafe_hash=True)
class GPUAssignment(LeaseFacts):
    """A worker's GPU on a single endpoint."""

    gpu_id: int
    worker_id: str
    assigned_at: datetime
    global_gpu_id: str | None = field(default=None, kw_only=True, compare=False, repr=False)
    endpoint_id: str | None = field(default=None, kw_only=True, compare=False, repr=False)
    local_gpu_id: int | None = field(default=None, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_count("gpu_id", self.gpu_id)
        _check_id("worker_id", self.worker_id)


@dataclass(unsafe_hash=True)
class GlobalGPUAssignment(LeaseFacts):
    """A worker's GPU on one of several endpoints."""

    global_gpu_id: str
    endpoint_id: str
    local_gpu_id: int
    worker_id: str
    assigned_at: datetime

    def __post_init__(self) -> None:
        _check_global_id(self.global_gpu_id, self.endpoint_id, self.local_gpu_id)
        _check_id("worker_id", self.worker_id)

    @property
    def gpu_id(self) -> str:
        """The global id, so that code for one endpoint works with several."""
        return self.global_gpu_id


Assignment = GPUAssignment | GlobalGPUAssignment


def make_assignment(
    gpus: Sequence[tuple[str, int]], worker_id: str, assigned_at: datetime, *, is_multi: bool, **facts: Any
) -> Assignment:
    """An assignment of GPUs, each the id of its endpoint and its index there, with the facts of its lease."""
    global_ids = tuple(f"{endpoint_id}:{index}" for endpoint_id, index in gpus)
    endpoint_id, index = gpus[0]
    if is_multi:
        return GlobalGPUAssignment(
            global_ids[0], endpoint_id, index, worker_id, assigned_at, gpu_ids=global_ids, **facts
        )
    return GPUAssignment(
        index,
        worker_id,
        assigned_at,
        global_gpu_id=global_ids[0],
        endpoint_id=endpoint_id,
        local_gpu_id=index,
        gpu_ids=tuple(index for _, index in gpus),
        **facts,
    )


@dataclass(frozen=True)
class LeaseInfo:
    """A lease as its server shows it, from the request to its end. Times are local; what is not known is None.

    `state` is `queued`, `active`, `draining` or `ended`. `reason` says why a queued lease waits, a draining one is not over,
    or an ended one ended. `is_mine`: this client requested it.
    """

    lease_id: str
    state: str
    endpoint_id: str
    is_mine: bool
    gpu_ids: tuple[GpuId, ...] = ()
    uuids: tuple[str, ...] = ()
    owner: str | None = None
    worker_id: str | None = None
    host: str | None = None
    pid: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    priority: int = 0
    memory_mb: float | None = None
    preemptible: bool = False
    position: int | None = None
    reason: str | None = None
    requested_at: datetime | None = None
    granted_at: datetime | None = None
    ends_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass
class EndpointInfo:
    """One endpoint. `last_seen` and `response_time_ms` are None before its first answer."""

    endpoint_id: str
    url: str
    is_healthy: bool
    last_seen: datetime | None
    total_gpus: int
    available_gpus: int
    response_time_ms: float | None

    def __post_init__(self) -> None:
        _check_id("endpoint_id", self.endpoint_id)
        _check_part("available_gpus", self.available_gpus, "total_gpus", self.total_gpus)
        _check_number("response_time_ms", self.response_time_ms, 1e9)


@dataclass
class PoolStatus:
    """The pool at a glance."""

    total_gpus: int
    available_gpus: int
    active_workers: int
    blocked_workers: int
    gpu_assignments: dict[GpuId, list[WorkerInfo]]

    def __post_init__(self) -> None:
        _check_part("available_gpus", self.available_gpus, "total_gpus", self.total_gpus)
        _check_count("active_workers", self.active_workers)
        _check_count("blocked_workers", self.blocked_workers)


@dataclass
class MultiEndpointPoolStatus(PoolStatus):
    """The pool over several endpoints. `endpoint_details` defaults to the `endpoints` as dicts."""

    total_endpoints: int
    healthy_endpoints: int
    endpoint_details: list[dict[str, Any]] = field(default_factory=list)
    endpoints: list[EndpointInfo] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_part("healthy_endpoints", self.healthy_endpoints, "total_endpoints", self.total_endpoints)
        self.endpoint_details = self.endpoint_details or [asdict(endpoint) for endpoint in self.endpoints]


def _show(value: object) -> str:
    """Quote a value in a few characters: a foreign server may send anything."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no number of thousands of digits
        return "a very long number"


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{name} is {_show(value)}; it must be a whole number, 0 or more")


def _check_part(name: str, part: int, whole_name: str, whole: int) -> None:
    _check_count(name, part)
    _check_count(whole_name, whole)
    if part > whole:
        raise ValueError(f"{name} is {part}, which is more than {whole_name}, {whole}")


def _check_number(name: str, value: object, high: float) -> None:
    """Accept None (unknown) or a number from 0 to `high`; NaN and infinities are refused."""
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= high:
        raise ValueError(f"{name} is {_show(value)}; it must be a number from 0 to {high:g}, or null if unknown")


def _check_text(name: str, value: object) -> None:
    """Refuse control characters: texts from servers appear in logs and on terminals."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise ValueError(f"{name} is {_show(value)}; it must be a text of at most {MAX_TEXT} printable characters")


def _check_id(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {_show(value)}; it must be a text that is not empty")


def _check_global_id(global_gpu_id: str, endpoint_id: str, local_gpu_id: int) -> None:
    _check_id("endpoint_id", endpoint_id)
    _check_count("local_gpu_id", local_gpu_id)
    if global_gpu_id != f"{endpoint_id}:{local_gpu_id}":
        raise ValueError(f"global_gpu_id is {_show(global_gpu_id)}; it must be {endpoint_id}:{local_gpu_id}")
