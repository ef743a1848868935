"""A lease in each of its states. Each state carries only its own data, so that no impossible lease can be written.

    queued -> active -> draining -> ended

Draining: the holder is done, but the GPU is not free before a reading shows that its processes are gone.
Fields ending in `_at` are wall-clock seconds, for people; nothing is ever decided by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .gpu import GpuKey
from .request import Request


class EndReason(StrEnum):
    """Why a lease ended."""

    RELEASED = "released"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    HOLDER_DIED = "holder_died"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class QueuedLease:
    """Asked for, waiting. `seq` is its place among all that were ever asked for."""

    id: str
    request: Request
    seq: int
    requested_at: float

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the queue: higher priority first, then first come first served."""
        return (-self.request.priority, self.seq)


@dataclass(frozen=True, slots=True)
class ActiveLease:
    """Granted: these GPUs are the holder's."""

    id: str
    request: Request
    gpus: tuple[GpuKey, ...]
    fence: int
    requested_at: float
    granted_at: float


@dataclass(frozen=True, slots=True)
class DrainingLease:
    """Over for its holder; `gpus` are those not yet known to be free of it, `since` is on the pool's clock."""

    id: str
    request: Request
    gpus: tuple[GpuKey, ...]
    since: float
    ended: EndedLease


@dataclass(frozen=True, slots=True)
class EndedLease:
    """Over. Without GPUs, fence and granted_at where it never left the queue."""

    id: str
    request: Request
    gpus: tuple[GpuKey, ...]
    fence: int | None
    requested_at: float
    granted_at: float | None
    ended_at: float
    reason: EndReason


LiveLease = QueuedLease | ActiveLease | DrainingLease
Lease = LiveLease | EndedLease
