"""Bodies of the lease calls, and how a lease ended or will end, as a phrase for its holder and for all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from gpu_worker_pool.core.model.lease import EndReason

from .bounds import is_printable

LeaseState = Literal["queued", "active", "draining", "ended"]
VerdictCode = Literal[
    "eligible",
    "excluded",
    "other_node",
    "not_among",
    "wrong_model",
    "too_small",
    "leased",
    "draining",
    "unhealthy",
    "reading_unknown",
    "reading_stale",
    "other_server",
    "in_use_outside",
    "over_memory",
    "over_utilization",
    "no_room",
    "sharers_full",
    "held",
    "booked",
    "over_quota",
    "first_right",
    "not_taken_up",
]
DateBasis = Literal["declared", "predicted", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRef:
    """A GPU. Its index and name are null until it has been read after a restart."""

    node: str | None = None
    gpu_id: int | None = None
    uuid: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictView:
    """Whether a GPU may be granted, as a code and as a sentence. The code determines the other keys."""

    code: VerdictCode
    text: str | None = None
    score: float | None = None
    reason: str | None = None
    wanted: str | None = None
    name: str | None = None
    limit_mb: float | None = None
    asked_mb: float | None = None
    lease_ids: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    since_at: float | None = None
    lease_id: str | None = None
    pid: int | None = None
    memory_mb: float | None = None
    fault: str | None = None
    what: str | None = None
    age_s: float | None = None
    memory_percent: float | None = None
    threshold_percent: float | None = None
    utilization_percent: float | None = None
    committed_mb: float | None = None
    for_lease_id: str | None = None
    for_holder: str | None = None
    server: str | None = None
    user: str | None = None
    program: str | None = None
    others: int | None = None
    sharers: int | None = None
    limit: int | None = None
    from_at: float | None = None
    booking_id: str | None = None
    owner: str | None = None
    starts_at: float | None = None
    ends_at: float | None = None
    within_s: float | None = None
    held: float | None = None
    quota: int | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObstacleView(VerdictView):
    """Why a waiting request does not get this GPU."""

    node: str | None = None
    gpu_id: int | None = None
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WishesView:
    """What was requested. `among` are the only GPUs that may be granted; null: any."""

    gpus: int = 1
    memory_mb: float | None = None
    model: str | None = None
    memory_threshold_percent: float | None = None
    utilization_threshold_percent: float | None = None
    among: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWishesView(WishesView):
    """What was requested of a fleet: a number of GPUs on each of a number of `nodes`, or GPUs of this `node` only."""

    nodes: int = 1
    node: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenWishesView(FleetWishesView):
    """The same where the GPUs must be sold with `min_memory_mb`, or those of `exclude` may not be granted."""

    min_memory_mb: float | None = None
    exclude: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWarning:
    """The server will end a lease: why, and when."""

    reason: EndReason
    ends_at: str
    ends_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A lease, from the request to its end. `env` is for the environment of a process that uses it; position 1 is next.

    `expires_in_s` is null for an active lease whose holder's process the server watches: it lasts as long as the process. In a
    fleet it is how long the lease lasts at least: 0 where only the box that has the GPU knows, as after a change of the leader.
    `ended_by` names the caller that ended it, unless the holder did; `end_note` has the words of the one that ended it, such as the
    exit code of a command.
    `ends_at` is when its time limit ends it; `warning` says that the server is about to end it. `idle_s` is how long its
    GPUs have computed nothing; null if they did lately. While it waits, `expected_start_at` is when it will probably start,
    and `expected_start_basis` what that rests on: declared time limits, or predictions from earlier leases. The lease of
    `expected_after` ends last before that.
    """

    id: str
    state: LeaseState
    reason: str | None = None
    position: int | None = None
    gpus: tuple[GpuRef, ...] = ()
    fence: int | None = None
    owner: str | None = None
    worker_id: str | None = None
    host: str | None = None
    pid: int | None = None
    priority: int = 0
    memory_mb: float | None = None
    requested_at: str | None = None
    granted_at: str | None = None
    ttl_s: float | None = None
    expires_in_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    wishes: WishesView | FleetWishesView | ChosenWishesView = WishesView()
    labels: Mapping[str, str] = field(default_factory=dict)
    is_local: bool = False
    ended_at: str | None = None
    end_reason: EndReason | None = None
    ended_by: str | None = None
    end_note: str | None = None
    time_limit_s: float | None = None
    preemptible: bool = False
    ends_at: str | None = None
    warning: EndWarning | None = None
    idle_s: float | None = None
    expected_start_at: str | None = None
    expected_start_basis: DateBasis | None = None
    expected_after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLeaseView(LeaseView):
    """A lease that has ended. `peak_memory_mb` is the most memory that it was seen to use on all its GPUs together,
    `mean_utilization_percent` the mean of what was read of them. Null is unknown, as the utilization of a shared GPU is.
    """

    peak_memory_mb: float | None = None
    mean_utilization_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingLeaseView(LeaseView):
    """A queued lease, shown by its id, with the obstacle at each GPU."""

    obstacles: tuple[ObstacleView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveLeaseView(LeaseView):
    """An active lease, shown by its id. `pool_id` identifies the pool that granted it, through restarts of its server."""

    pool_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainingLeaseView(EndedLeaseView):
    """A lease that ended while its processes still hold memory on some of its GPUs."""

    draining_gpus: tuple[GpuRef, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """What a gang has on one node, and the environment of its processes there."""

    node: str
    gpus: tuple[GpuRef, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GangLeaseView(ActiveLeaseView):
    """An active lease on several nodes. `env` is that of the node that was asked if the lease has GPUs there, otherwise of
    the first node.
    """

    nodes: tuple[NodePart, ...] = ()


AnyLease = LeaseView | EndedLeaseView | WaitingLeaseView | ActiveLeaseView | DrainingLeaseView | GangLeaseView


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseList:
    """All live leases. `node` is null if they are those of a whole fleet."""

    node: str | None
    leases: tuple[LeaseView | DrainingLeaseView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """A lease that has its full TTL again; `expires_in_s` is null if it lasts as long as its holder's process."""

    id: str
    expires_in_s: float | None = None
    warning: EndWarning | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRenewed:
    """A lease that has ended; the reason says how, or `unknown`. `by` names the caller that ended it, unless its holder
    did, and `note` has that caller's words.
    """

    id: str
    reason: str = "unknown"
    by: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewAnswer:
    """The outcome for each id. The leases were renewed `held_s` after the call had come, or later. `pool_id` identifies the
    pool that answers.
    """

    renewed: tuple[Renewed, ...] = ()
    lost: tuple[NotRenewed, ...] = ()
    held_s: float | None = None
    pool_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedView:
    """Whether a waiter would be served before a new request like that of the lease if the lease were released now. `by` is the
    owner of that waiter, if it has a name.
    """

    id: str
    is_wanted: bool
    by: str | None = None


_ENDS = {
    "released": "it was given back",
    "expired": "it expired, as no heartbeat of its holder arrived",
    "cancelled": "it left the queue before it was granted",
    "holder_died": "its holder's process died",
    "revoked": "an operator took it away",
    "time_limit": "its time limit is over",
    "preempted": "it was preemptible, and another request needed its GPUs",
    "idle": "its GPUs had computed nothing for too long",
    "unknown": "the server does not know the lease",
}
_WARNINGS = {
    "time_limit": "time limit",
    "preempted": "preempted: another request needs its GPUs",
    "idle": "idle: its GPUs compute nothing",
}
_BY = {
    "released": "it was released by",
    "cancelled": "it was taken out of the queue by",
    "revoked": "it was revoked by",
}


def ending(reason: str, by: str | None = None, note: str | None = None) -> str:
    """How a lease ended: the reason, by whom, and their words. A server may say anything, so it is made printable."""
    said = f"{_BY[reason]} {_plain(by)}" if by and reason in _BY else _ENDS.get(reason, _plain(reason))
    return f"{said}: {_plain(note)}" if note else said


def coming_end(reason: str, ends_at: datetime) -> str:
    """What the holder of a lease is told before the server ends it."""
    return f"the lease ends at {ends_at:%H:%M} ({_WARNINGS.get(reason, _plain(reason))})"


def after_warning(reason: str) -> str:
    """That a lease was over before the server had to end it."""
    return f"after the warning ({_WARNINGS.get(reason, _plain(reason))})"


def _plain(text: str) -> str:
    return "".join(sign if is_printable(sign) else "?" for sign in text)[:300]
