"""The shape of what is answered about leases, for the interactive documentation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class LeasedGpu(BaseModel):
    """Which GPU. The index is null until the GPU has been looked at after a restart."""

    node: str
    gpu_id: int | None
    uuid: str
    name: str | None


class Lease(BaseModel):
    """A lease, from asking to the end. `env` is what to put into the environment of a process that uses it."""

    id: str
    state: Literal["queued", "active", "draining", "ended"]
    reason: str | None
    position: int | None
    gpus: list[LeasedGpu]
    fence: int | None
    owner: str | None
    worker_id: str | None
    host: str | None
    pid: int | None
    priority: int
    memory_mb: float | None
    requested_at: str | None
    granted_at: str | None
    ttl_s: float
    expires_in_s: float | None
    env: dict[str, str]
    wishes: dict[str, Any]
    labels: dict[str, str]
    is_local: bool
    ended_at: str | None
    end_reason: Literal["released", "expired", "cancelled", "holder_died", "revoked"] | None
    # What stands between a waiting request and each GPU.
    obstacles: list[dict[str, Any]] = []
    draining_gpus: list[LeasedGpu] = []


class LeaseList(BaseModel):
    """All live leases."""

    node: str
    leases: list[Lease]


class Renewed(BaseModel):
    """It has its full TTL again."""

    id: str
    expires_in_s: float


class Lost(BaseModel):
    """It is over (how, says the reason), or `unknown`."""

    id: str
    reason: str


class RenewAnswer(BaseModel):
    """What became of each id."""

    renewed: list[Renewed]
    lost: list[Lost]


class PoolProcess(BaseModel):
    """A process on a GPU, and whose it is. `is_outside` is null where it cannot be told whether it belongs to a lease."""

    pid: int
    name: str | None
    used_mb: float | None
    lease_ids: list[str]
    is_outside: bool | None
    is_ignored: bool


class PoolGpu(BaseModel):
    """A GPU with its state in a word, and why."""

    model_config = ConfigDict(extra="allow")

    node: str
    gpu_id: int | None
    uuid: str
    name: str | None
    state: Literal["free", "leased", "shared", "draining", "out_of_service", "unhealthy", "unknown", "busy", "held"]
    reason: str
    leases: list[str]
    processes: list[PoolProcess] | None = None


class Thresholds(BaseModel):
    """A GPU at or over one of these is not granted."""

    memory_percent: float
    utilization_percent: float


class Pool(BaseModel):
    """The node at a glance."""

    node: str
    gpus: list[PoolGpu]
    leases: list[Lease]
    queue: list[Lease]
    thresholds: Thresholds
    workers_per_gpu: int
    queue_length: int
    server_id: str
    machine: str
    ignored_processes: list[str]
    can_grant: bool
    trouble: str | None
    now: str | None
    timestamp: str
    source: str


class IgnoredProcesses(BaseModel):
    """Processes of these names do not count as use from outside."""

    ignored_processes: list[str]


class UsageTotal(BaseModel):
    """What leases come to within the span. A lease of two GPUs for an hour is two GPU-hours.

    `gpu_hours` is of leases that had their GPUs to themselves, `shared_gpu_hours` of those that asked for an amount of
    memory: these overlap on a GPU. `leases` is how many held GPUs, `running` how many of them still do, `longest_hours`
    how long the longest did. `wait_hours` were spent in the queue, also by those who left it without a GPU. Of
    `unknown_leases` and `unknown_waits` it is not known how long: a clock was set meanwhile.
    """

    gpu_hours: float
    shared_gpu_hours: float
    leases: int
    running: int
    longest_hours: float
    wait_hours: float
    unknown_leases: int
    unknown_waits: int


class OwnerUsage(UsageTotal):
    """What the leases of one owner come to; null is whoever named no owner."""

    owner: str | None


class OtherUsage(UsageTotal):
    """What the leases of all further owners come to, and how many they are."""

    owners: int


class UsageAnswer(BaseModel):
    """Who used the GPUs from `since` to before `until`, and for how long; who used most comes first.

    Of what ended before `complete_since` not everything is known any more; null: all is known. `others` is null unless
    there are too many owners to show each.
    """

    node: str
    since: str
    until: str
    complete_since: str | None
    is_complete: bool
    owners: list[OwnerUsage]
    others: OtherUsage | None
    total: UsageTotal
    server_id: str
    source: str


class TimelineSpan(BaseModel):
    """That a lease held the GPU; `until` and `end_reason` are null where it still does. `label` is its label `command`."""

    lease_id: str
    owner: str | None
    worker_id: str | None
    label: str | None
    since: str
    until: str | None
    end_reason: Literal["released", "expired", "cancelled", "holder_died", "revoked"] | None
    is_shared: bool


class TimelineGpu(BaseModel):
    """A GPU and who held it, in the order in which they got it. One that is no longer there has no index and no name."""

    uuid: str
    gpu_id: int | None
    name: str | None
    spans: list[TimelineSpan]


class TimelineAnswer(BaseModel):
    """Who held which GPU at some time from `since` to `until`; a span may have begun before.

    Of what ended before `complete_since` not everything is known any more; null: all is known. `is_cut`: there were too
    many, and those that ended first are left out. Of `unknown_leases` it is not known when they held their GPUs, because a
    clock was set meanwhile; they are left out as well.
    """

    node: str
    since: str
    until: str
    complete_since: str | None
    gpus: list[TimelineGpu]
    is_cut: bool
    unknown_leases: int
    server_id: str
    source: str


class PeerAnswer(BaseModel):
    """Another server. `is_up` is null until it has been asked; `error` is why it is not up.

    `age_s` is how long ago it answered last; null: never yet. `pool` is what its `/pool` said then, with at most 200 of
    its queue; null where that is more than a minute ago.
    """

    url: str
    node: str | None
    is_up: bool | None
    error: str | None
    age_s: float | None
    pool: dict[str, Any] | None


class PeersAnswer(BaseModel):
    """The other servers that this one is told of, in the order of the setting; without itself."""

    peers: list[PeerAnswer]
