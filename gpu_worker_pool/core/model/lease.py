"""A lease in each of its states. Each state carries only its own data, so an impossible lease cannot be written down.

    queued -> active -> draining -> ended

Draining: the holder is done, but a reading must still show that its processes have left the GPU.
Fields that end in `_at` are wall-clock seconds, for people. No decision uses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .gpu import GpuKey
from .request import Request


class EndReason(StrEnum):
    RELEASED = "released"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    HOLDER_DIED = "holder_died"
    REVOKED = "revoked"


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
    def order(self) -> tuple[int, int]:
        """Sort key: higher priority first, then first come, first served."""
        return (-self.request.priority, self.seq)


@dataclass(frozen=True, slots=True)
class ActiveLease:
    id: str
    request: Request
    gpus: tuple[GpuKey, ...]
    fence: int
    requested_at: float
    granted_at: float

    @property
    def ttl_s(self) -> float | None:
        """How long it lasts without a heartbeat; None if it lasts as long as its holder's process, which is watched."""
        return None if self.request.holder.is_local else self.request.ttl_s


@dataclass(frozen=True, slots=True)
class DrainingLease:
    """Ended for its holder. `gpus` are those not yet known to be free of it; `since` is on the pool's clock."""

    id: str
    request: Request
    gpus: tuple[GpuKey, ...]
    since: float
    ended: EndedLease

    @property
    def was_left_by_holder(self) -> bool:
        """Whether the holder itself released it. Its process may go on, and knows that the GPU is no longer its own."""
        return self.ended.reason is EndReason.RELEASED and self.ended.by is None


@dataclass(frozen=True, slots=True)
class EndedLease:
    """Ended. A lease that never left the queue has no GPUs, fence or granted_at. `by` and `why` are as in LeaseEnded."""

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


LiveLease = QueuedLease | ActiveLease | DrainingLease
Lease = LiveLease | EndedLease


def as_ended(lease: Lease | None) -> EndedLease | None:
    """The end of this lease, also while its GPUs drain; None if it has not ended."""
    ended = lease.ended if isinstance(lease, DrainingLease) else lease
    return ended if isinstance(ended, EndedLease) else None
