"""Bodies of the accounting calls: who used the GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker_pool.core.model.lease import EndReason


@dataclass(frozen=True, kw_only=True)
class UsageTotal:
    """The use by leases within the span. A lease of two GPUs for an hour is two GPU-hours.

    `gpu_hours` is of exclusive leases, `shared_gpu_hours` of leases with an amount of memory, which overlap on a GPU.
    `leases` is the number of leases that held GPUs, `running` how many still do, `longest_hours` the duration of the
    longest. `wait_hours` is the time in the queue, also of requests that left it without a GPU. The durations of
    `unknown_leases` and `unknown_waits` are unknown, because a clock was set meanwhile. `time_limit_ends`,
    `preempted_ends` and `idle_ends` are leases that the server ended within the span, by why. `measured_gpu_hours` are of
    ended leases whose mean utilization is known, and `busy_gpu_hours` the part of them in which the GPUs computed.
    """

    gpu_hours: float
    shared_gpu_hours: float
    leases: int
    running: int
    longest_hours: float
    wait_hours: float
    unknown_leases: int
    unknown_waits: int
    time_limit_ends: int = 0
    preempted_ends: int = 0
    idle_ends: int = 0
    measured_gpu_hours: float = 0.0
    busy_gpu_hours: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Owner:
    owner: str | None


@dataclass(frozen=True, kw_only=True)
class _Owners:
    owners: int


@dataclass(frozen=True, kw_only=True)
class OwnerUsage(UsageTotal, _Owner):
    """The use by one owner; null is for requests that named no owner."""


@dataclass(frozen=True, kw_only=True)
class OtherUsage(UsageTotal, _Owners):
    """The use by all further owners, and their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageView:
    """The use of the GPUs from `since` to before `until` by owner, most use first.

    Not all leases that ended before `complete_since` are known any more; null: all are known. `others` is null unless
    there are too many owners to show each. `groups` has the sums of groups, by their names.
    """

    node: str | None
    since: str | None
    until: str | None
    complete_since: str | None
    is_complete: bool
    owners: tuple[OwnerUsage, ...]
    others: OtherUsage | None
    total: UsageTotal
    server_id: str
    source: str
    groups: tuple[OwnerUsage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """A time in which a lease held the GPU; `until` is null if it still does. `label` is the lease's label `command`;
    `ended_by` names the caller that ended it, unless its holder did; `end_note` has the words of the one that did, such as the
    exit code of a command. `peak_memory_mb` and `mean_utilization_percent` are as of
    an ended lease, of all its GPUs together.
    """

    lease_id: str
    owner: str | None
    worker_id: str | None
    label: str | None
    since: str | None
    until: str | None
    end_reason: EndReason | None
    is_shared: bool
    ended_by: str | None = None
    end_note: str | None = None
    peak_memory_mb: float | None = None
    mean_utilization_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineGpu:
    """A GPU and its holders, in the order of their grants. A GPU that was removed has no index and no name."""

    uuid: str
    gpu_id: int | None
    name: str | None
    spans: tuple[TimelineSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTimelineGpu(TimelineGpu):
    """A GPU of a whole fleet."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineView:
    """The holders of each GPU from `since` to `until`; a span may have begun earlier.

    Not all leases that ended before `complete_since` are known any more; null: all are known. `is_cut`: there are too
    many spans, and those that ended first are left out. `unknown_leases` are left out too: a clock was set while they
    held their GPUs.
    """

    node: str | None
    since: str | None
    until: str | None
    complete_since: str | None
    gpus: tuple[TimelineGpu | FleetTimelineGpu, ...]
    is_cut: bool
    unknown_leases: int
    server_id: str
    source: str
