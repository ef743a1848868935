"""What the machine of a box wants done (custody.py), and how it answers heartbeats."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpu_worker_pool.core.model.configured import AccessToken
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import EndReason, KeptLease

from .messages import AgentMessage, LeaseOver


@dataclass(frozen=True, slots=True)
class Keep:
    """Have this on the disk for the id, in place of what is there: a lease, its end, or nothing."""

    lease_id: str
    what: KeptLease | LeaseOver | None


@dataclass(frozen=True, slots=True)
class NoteSeen:
    """Write the highest epoch and fence to the disk that this box has seen."""

    epoch: int
    fence: int


@dataclass(frozen=True, slots=True)
class KeepTokens:
    """Write the tokens that operators added to the disk, in place of those that are there."""

    tokens: tuple[AccessToken, ...]


@dataclass(frozen=True, slots=True)
class Send:
    message: AgentMessage


@dataclass(frozen=True, slots=True)
class WatchProcess:
    """Call `died` when this process is gone, also if it is gone already. It may be watched for this id already."""

    lease_id: str
    process: ProcessId


@dataclass(frozen=True, slots=True)
class StopWatching:
    lease_id: str


@dataclass(frozen=True, slots=True)
class LookNow:
    """Begin to read all GPUs; the leader waits for it."""


@dataclass(frozen=True, slots=True)
class TellHolder:
    """A warning changed, or the lease has ended: answer heartbeats of this lease that are held back."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the connection to this leader, and look for the leader again."""

    why: str


CustodyAction = Keep | NoteSeen | KeepTokens | Send | WatchProcess | StopWatching | LookNow | TellHolder | CloseLink


class RenewalState(StrEnum):
    RENEWED = "renewed"
    # This box ended it, or heard that it has ended.
    ENDED = "ended"
    # This box does not keep its TTL: ask the leader which box does.
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class LeaseWarning:
    """The leader ends the lease at this time on the box's boot clock."""

    reason: EndReason
    ends_s: float


@dataclass(frozen=True, slots=True)
class KeptRenewal:
    """The answer to a heartbeat. `expires_in_s` is None for a lease that lasts as long as its holder's process. `reason` is
    how an ended lease ended; None if only the leader knows.
    """

    lease_id: str
    state: RenewalState
    expires_in_s: float | None = None
    warning: LeaseWarning | None = None
    reason: EndReason | None = None
