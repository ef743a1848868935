"""What happens to an executor (crew.py decides what follows). Tasks and workers are known by numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskSubmitted:
    task: int


@dataclass(frozen=True, slots=True)
class TaskCancelled:
    """Its caller has cancelled it before it was sent to a worker."""

    task: int


@dataclass(frozen=True, slots=True)
class TaskNotSent:
    """The task did not go to the worker: it was cancelled just now, or it cannot be pickled. Its future is settled."""

    worker: int
    task: int


@dataclass(frozen=True, slots=True)
class TaskUndelivered:
    """The worker had ended before the task reached it, so the task has certainly not begun."""

    worker: int
    task: int


@dataclass(frozen=True, slots=True)
class TaskSettled:
    """The worker has answered, with a result or an exception, and the future has it."""

    worker: int
    task: int


@dataclass(frozen=True, slots=True)
class WorkerLeased:
    """The lease that was requested for this worker is granted."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    """There will be no lease for this worker: none could ever be granted, or not in time."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """Its process has started and has run the initializer."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerUnfit:
    """Its process could not load the program, or its initializer raised an exception. Others would do the same."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerHungUp:
    """It answers no more: it has just ended, or a task has closed its line."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """None of its processes is left, for whatever reason, and all that it had answered was settled before."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    """Its lease is released, or it had none."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerLeaseLost:
    worker: int


@dataclass(frozen=True, slots=True)
class WorkerWarned:
    """The server will end the lease soon; with `is_warned` false, it has withdrawn the warning."""

    worker: int
    is_warned: bool


@dataclass(frozen=True, slots=True)
class ShutDown:
    """No more tasks will come. `cancels_tasks`: those that wait are cancelled."""

    cancels_tasks: bool = False


@dataclass(frozen=True, slots=True)
class CrewInterrupted:
    """The user has pressed Ctrl-C: no more tasks will come, those that wait are cancelled, those that run are ended."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The time of `next_deadline` has come."""


WorkerFact = (
    WorkerLeased
    | WorkerRefused
    | WorkerReady
    | WorkerUnfit
    | WorkerHungUp
    | WorkerGone
    | WorkerReleased
    | WorkerLeaseLost
    | WorkerWarned
)
Fact = (
    TaskSubmitted
    | TaskCancelled
    | TaskNotSent
    | TaskUndelivered
    | TaskSettled
    | ShutDown
    | CrewInterrupted
    | TimePassed
    | WorkerFact
)
