"""Bodies of the accounting calls: who used the GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker_pool.core.model.lease import EndReason


@dataclass(frozen=True, kw_only=True)
class UsageTotal:
    """What leases come to within the span. A lease of two GPUs for an hour is two GPU-hours.

    `gpu_hours` is of exclusive leases, `shared_gpu_hours` of those that asked for an amount of memory: these overlap on
    a GPU. `leases` is how many held GPUs, `running` how many of them still do, `longest_hours` how long the longest did.
    `wait_hours` were spent in the queue, also by requests that left it without a GPU. Of `unknown_leases` and
    `unknown_waits` the duration is not known: a clock was set meanwhile.
    """

    gpu_hours: float
    shared_gpu_hours: float
    leases: int
    running: int
    longest_hours: float
    wait_hours: float
    unknown_leases: int
    unknown_waits: int


@dataclass(frozen=True, kw_only=True)
class _Owner:
    owner: str | None


@dataclass(frozen=True, kw_only=True)
class _Owners:
    owners: int


@dataclass(frozen=True, kw_only=True)
class OwnerUsage(UsageTotal, _Owner):
    """What the leases of one owner come to; null is for requests that named no owner."""


@dataclass(frozen=True, kw_only=True)
class OtherUsage(UsageTotal, _Owners):
    """What the leases of all further owners come to, and how many owners they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageView:
    """Who used the GPUs from `since` to before `until`, and for how long; the owner who used most comes first.

    Of what ended before `complete_since` not everything is known any more; null: all is known. `others` is null unless
    there are too many owners to show each.
    """

    node: str
    since: str | None
    until: str | None
    complete_since: str | None
    is_complete: bool
    owners: tuple[OwnerUsage, ...]
    others: OtherUsage | None
    total: UsageTotal
    server_id: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """A time in which a lease held the GPU; `until` is null where it still does. `label` is its label `command`."""

    lease_id: str
    owner: str | None
    worker_id: str | None
    label: str | None
    since: str | None
    until: str | None
    end_reason: EndReason | None
    is_shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineGpu:
    """A GPU and its holders, in the order in which they got it. One that is no longer there has no index and no name."""

    uuid: str
    gpu_id: int | None
    name: str | None
    spans: tuple[TimelineSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineView:
    """Who held which GPU at some time from `since` to `until`; a span may have begun before.

    Of what ended before `complete_since` not everything is known any more; null: all is known. `is_cut`: there were too
    many spans, and those that ended first are left out. `unknown_leases` are left out as well: a clock was set while
    they held their GPUs.
    """

    node: str
    since: str | None
    until: str | None
    complete_since: str | None
    gpus: tuple[TimelineGpu, ...]
    is_cut: bool
    unknown_leases: int
    server_id: str
    source: str
