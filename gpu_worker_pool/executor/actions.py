"""What an executor wants done (crew.py)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class EndingWay(Enum):
    """How a worker is ended. Each takes a grace before it becomes the next harder one."""

    # It has nothing to do: it ends by itself. A lease that is only requested is withdrawn.
    QUIETLY = auto()
    # As Ctrl-C does.
    INTERRUPT = auto()
    # As the end of a lease demands it.
    TERMINATE = auto()
    # As a user demands it who has asked before: with hardly any grace.
    AT_ONCE = auto()


class FailureCause(Enum):
    """Why a task has no result. The worker is the one that it is about."""

    WORKER_DIED = auto()
    LEASE_LOST = auto()
    NO_LEASE = auto()
    WORKER_UNFIT = auto()
    STARTS_FAILED = auto()
    # Its lease was about to end, or ended, before the worker was ready; so did those of others before it.
    LEASES_TOO_SHORT = auto()
    INTERRUPTED = auto()


@dataclass(frozen=True, slots=True)
class LeaseWorker:
    """Request a lease for a new worker of this number."""

    worker: int


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start its process."""

    worker: int


@dataclass(frozen=True, slots=True)
class SendTask:
    """Send the task to the worker, unless it was cancelled; then say so (TaskNotSent)."""

    worker: int
    task: int


@dataclass(frozen=True, slots=True)
class EndWorker:
    """End all its processes, and say when none is left (WorkerGone). It may be called again with a harder way."""

    worker: int
    way: EndingWay


@dataclass(frozen=True, slots=True)
class ReleaseWorker:
    """Release its lease, if it has one, and say so (WorkerReleased)."""

    worker: int


@dataclass(frozen=True, slots=True)
class FailTask:
    task: int
    worker: int
    cause: FailureCause
    # How often it was sent to a worker.
    attempts: int


@dataclass(frozen=True, slots=True)
class RepeatTask:
    """Say that this task will be sent to a worker again, and why. Nothing else is to be done."""

    task: int
    worker: int
    cause: FailureCause
    attempts: int


@dataclass(frozen=True, slots=True)
class CancelTask:
    task: int


@dataclass(frozen=True, slots=True)
class BreakCrew:
    """Refuse tasks from now on: no worker can do them."""

    worker: int
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class StopCrew:
    """Everything is done, and no lease is left."""


CrewAction = (
    LeaseWorker
    | StartWorker
    | SendTask
    | EndWorker
    | ReleaseWorker
    | FailTask
    | RepeatTask
    | CancelTask
    | BreakCrew
    | StopCrew
)
