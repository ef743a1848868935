"""A lease in each of its states. Each state carries only its own data, so an impossible lease cannot be written down.

    queued -> active -> ended

An ended lease drains while a reading must still show that its processes have left the GPU.
Fields that end in `_at` are wall-clock seconds, for people. `limit`, `since` and the time of an ending are on the pool's
clock, which no one sets.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple

from .gpu import GpuKey
from .request import Request

# The holder of a lease is warned this long before its time limit.
WARNING_S = 60.0
# If a warning comes late, the holder still has this part of that time.
LEAST_WARNING = 1 / 6
# What one whole GPU weighs.
FULL_WEIGHT = 1000


class EndReason(StrEnum):
    RELEASED = "released"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    HOLDER_DIED = "holder_died"
    REVOKED = "revoked"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    IDLE = "idle"


# What a job is told whose lease the server ended as it had announced.
END_TEXTS: Final = {
    EndReason.TIME_LIMIT: "the time limit is over",
    EndReason.PREEMPTED: "preempted: another request needed the GPU",
    EndReason.IDLE: "the GPU had computed nothing for too long",
}


@dataclass(frozen=True, slots=True)
class QueuedLease:
    """A request in the queue. `seq` numbers all requests in the order of their arrival."""

    id: str
    request: Request
    seq: int
    requested_at: float

    @property
    def ttl_s(self) -> float:
        """How long it waits without a heartbeat."""
        return self.request.ttl_s

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sort key: preemptible requests last, higher priority first, then first come, first served."""
        return (self.request.preemptible, -self.request.priority, self.seq)


@dataclass(frozen=True, slots=True)
class Ending:
    """The pool has told the holder that it ends the lease at this time on its clock."""

    reason: EndReason
    at: float


@dataclass(frozen=True, slots=True)
class ActiveLease:
    """`limit` is when its time limit ends it. `weight` is what counts for its owner, in thousandths of a GPU. `seq` is what
    its queue position was by, and is again if the grant is withdrawn.
    """

    id: str
    request: Request
    gpus: tuple[GpuKey, ...]
    fence: int
    requested_at: float
    granted_at: float
    weight: int
    limit: float | None = None
    ending: Ending | None = None
    seq: int = 0

    @property
    def warning_s(self) -> float:
        """How long before its time limit the holder is warned."""
        declared_s = self.request.time_limit_s
        return WARNING_S if declared_s is None else min(WARNING_S, declared_s / 2)

    def end_if_warned(self, now: float) -> float:
        """When its time limit ends it, if its holder is warned now: even a late warning leaves some time."""
        return max(now if self.limit is None else self.limit, now + self.warning_s * LEAST_WARNING)

    @property
    def ends(self) -> float | None:
        """When the pool ends it, as far as is known now; None if it does not."""
        return self.limit if self.ending is None else self.ending.at

    @property
    def ttl_s(self) -> float | None:
        """How long it lasts without a heartbeat; None if it lasts as long as its holder's process, which is watched."""
        holder = self.request.holder
        is_watched = holder.is_local and (
            holder.node is None or all(holder.process_on(key.node) is not None for key in self.gpus)
        )
        return None if is_watched else self.request.ttl_s


def custodian(lease: ActiveLease) -> str:
    """The one node of a fleet that counts the heartbeats of a lease: the holder's own, if the lease has a GPU there."""
    own = lease.request.holder.node
    return own if own is not None and any(key.node == own for key in lease.gpus) else lease.gpus[0].node


@dataclass(frozen=True, slots=True)
class KeptLease:
    """A lease as a box keeps it. `gpus` are the UUIDs of its GPUs on this node. The box that `is_custodian` decides when
    it expires; `ttl_s` is None if the lease lasts as long as its holder's process. The request and the times are
    there so that a database that lost the grant can have it back.
    """

    id: str
    fence: int
    request: Request
    gpus: tuple[str, ...]
    ttl_s: float | None
    is_custodian: bool
    requested_at: float
    granted_at: float


@dataclass(frozen=True, slots=True)
class EndedLease:
    """Ended. A lease that never left the queue has no GPUs, fence or granted_at. `by` and `why` are as in LeaseEnded.
    `warned` is for what its holder had been told to end, if it did so in time. `draining` are the GPUs not yet known to be
    free of it; `drains_since` is on the pool's clock. The most memory and the mean utilization are as in LeaseUse.
    """

    id: str
    request: Request
    gpus: tuple[GpuKey, ...]
    fence: int | None
    requested_at: float
    granted_at: float | None
    ended_at: float
    reason: EndReason
    by: str | None = None
    why: str | None = None
    warned: EndReason | None = None
    draining: tuple[GpuKey, ...] = ()
    drains_since: float | None = None
    # What was seen since it was last written is lost by a restart, so these do not count for equality.
    peak_memory_mb: float | None = field(default=None, compare=False)
    mean_utilization_percent: float | None = field(default=None, compare=False)

    @property
    def was_left_by_holder(self) -> bool:
        """Whether the holder itself released it. Its process may go on, and knows that the GPU is no longer its own."""
        return self.reason is EndReason.RELEASED and self.by is None

    @property
    def record(self) -> EndedLease:
        """The lease as the accounting keeps it, whatever drains."""
        return replace(self, draining=(), drains_since=None) if self.draining else self


class LeaseUse(NamedTuple):
    """What a lease was seen to use of its GPUs. Unknown is None, never 0.

    `peak_memory_mb` is the most on all its GPUs together. The utilizations that were read of them add up to
    `utilization_sum`, and there are `samples` of them.
    """

    lease_id: str
    peak_memory_mb: float | None = None
    utilization_sum: float = 0.0
    samples: int = 0

    @property
    def is_known(self) -> bool:
        return self.peak_memory_mb is not None or self.samples > 0

    @property
    def mean_utilization_percent(self) -> float | None:
        return round(self.utilization_sum / self.samples, 1) if self.samples else None


Lease = QueuedLease | ActiveLease | EndedLease


class Basis(StrEnum):
    """What a date rests on; the surer comes first in the order of the words."""

    DECLARED = "declared"
    PREDICTED = "predicted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reservation:
    """The GPUs that are kept for the first waiter that cannot be served.

    The waiter can start at `date` on the pool's clock with these GPUs, by node and index, if the leases there end as
    they declared, or as is predicted. `after` is the lease that ends last. `seen` is when readings last bore it out.
    """

    lease_id: str
    gpus: tuple[GpuKey, ...]
    date: float
    basis: Basis
    after: str | None = None
    seen: float = field(default=0.0, compare=False)

    @property
    def nodes(self) -> set[str]:
        return {key.node for key in self.gpus}
