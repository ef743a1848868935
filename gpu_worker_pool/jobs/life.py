"""The life of a submission: its tasks, the events that change them, and what becomes of each task.

A submission is one job, or an array of tasks. A function below decides and returns an event; `Submission.evolve` applies an
event and decides nothing. So the events of a submission, replayed, give the same lives again: for the keeper, for the
supervisors that take its tasks, and for every command that shows them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from gpu_worker_pool.core.model.lease import EndReason

from .job_key import JobKey

# An exit code above this says which signal ended a command.
SIGNAL_BASE: Final = 128
# How often a job that was preempted is run again.
MAX_PREEMPTIONS: Final = 100


class JobState(StrEnum):
    SUBMITTED = "submitted"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    SKIPPED = "skipped"

    @property
    def is_over(self) -> bool:
        return self not in _LIVE


_LIVE: Final = frozenset({JobState.SUBMITTED, JobState.WAITING, JobState.RUNNING})


class AfterFailure(StrEnum):
    """What becomes of a job if a job that it comes after has not ended well."""

    SKIP = "skip"
    RUN = "run"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class JobTerms:
    """What was submitted, as far as its life depends on it. `indices` are those of an array, in the order in which its tasks
    are run; None alone: it is one job. `after` may name whole arrays. Where it `stops_on_failure`, no task is started once
    one has failed.
    """

    number: int
    indices: tuple[int | None, ...] = (None,)
    priority: int = 0
    retries: int = 0
    after: tuple[JobKey, ...] = ()
    after_failure: AfterFailure = AfterFailure.SKIP
    at_once: int | None = None
    stops_on_failure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The most memory and the highest utilization of the GPUs of a lease, and the mean utilization; None: unknown."""

    peak_memory_mb: float | None = None
    peak_utilization_percent: float | None = None
    mean_utilization_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A supervisor, its guard, and the lease that they have: how to find the processes again, and what the tasks run on.

    `nodes` are those of the `uuids`; empty where they are not known.
    """

    id: str
    pid: int
    started: float | None = None
    guard_pid: int
    guard_started: float | None = None
    boot_id: str
    pid_namespace: str | None = None
    lease_id: str | None = None
    url: str | None = None
    gpus: tuple[int | str, ...] = ()
    uuids: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


# --- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """GPUs are being requested for its next task, by a worker of this name."""

    at: float
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened:
    """A supervisor has GPUs, and is about to take tasks."""

    at: float
    run: RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStarted:
    """A supervisor has taken a task. This is on the disk before the command starts."""

    at: float
    index: int | None = None
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    """No process of its command is left, and the task `becomes` something else. `behind`: it waits again, behind the
    submissions up to that number.
    """

    at: float
    index: int | None = None
    becomes: JobState
    exit_code: int | None = None
    why: str | None = None
    end_reason: str | None = None
    behind: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClosed:
    """A supervisor takes no more tasks. `is_yielded`: another request comes first, though tasks are left. It is written again
    with the `usage`, which is known once the lease has ended.
    """

    at: float
    run: str
    usage: Usage | None = None
    is_yielded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAsked:
    """The user wants these tasks cancelled (None: all). What waits is cancelled by this; what runs is being ended."""

    at: float
    indices: tuple[int | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksClosed:
    """The tasks that wait are over without a run: skipped, or failed because they can have no GPU. `indices`: only these."""

    at: float
    becomes: JobState
    why: str | None = None
    exit_code: int | None = None
    indices: tuple[int | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksRetried:
    """The user wants these tasks run again, behind the submissions up to `behind`."""

    at: float
    behind: int
    indices: tuple[int | None, ...]


JobEvent = Requested | RunOpened | TaskStarted | TaskEnded | RunClosed | CancelAsked | TasksClosed | TasksRetried


class ImpossibleEvent(ValueError):  # noqa: N818 - it is about the event
    """An event that a submission in this state cannot have: its journal is damaged."""


# --- state -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class JobLife:
    """A task as its events have made it. Times are seconds since 1970; those of a run are of the last one."""

    key: JobKey
    state: JobState = JobState.SUBMITTED
    attempts: int = 0
    # Attempts that count for the retries: not those that were preempted, nor those before its user had it run again.
    tries: int = 0
    preemptions: int = 0
    behind: int | None = None
    is_cancel_asked: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    run: str | None = None
    exit_code: int | None = None
    why: str | None = None
    end_reason: str | None = None


@dataclass(slots=True)
class Submission:
    """One job, or all tasks of an array, with the supervisors that take them. `evolve` changes it, and nothing else does."""

    terms: JobTerms
    runs: dict[str, RunFacts] = field(default_factory=dict)
    usage: dict[str, Usage] = field(default_factory=dict)
    # The supervisors that may still take tasks.
    open_runs: dict[str, RunFacts] = field(default_factory=dict)
    # Since when GPUs are requested for its next task; None while none are.
    requested_at: float | None = None
    requested_by: str = ""
    # When a supervisor last released its GPUs for another request.
    yielded_at: float = 0.0
    counts: Counter[JobState] = field(init=False)
    # Tasks to which nothing has happened are not in it.
    _lives: dict[int | None, JobLife] = field(default_factory=dict)
    _places: dict[int | None, int] = field(init=False)
    # A heap of what may be taken, by place; what is run again after a failure is behind all others.
    _ready: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        indices = self.terms.indices
        self._places = {index: place for place, index in enumerate(indices)}
        self._ready = [(0, place) for place in range(len(indices))]
        self.counts = Counter({JobState.SUBMITTED: len(indices)})

    @property
    def is_over(self) -> bool:
        return not (self.counts[JobState.SUBMITTED] or self.counts[JobState.RUNNING])

    @property
    def is_stopped(self) -> bool:
        """Whether no further task is started, because one has failed."""
        return self.terms.stops_on_failure and bool(self.counts[JobState.FAILED] or self.counts[JobState.INTERRUPTED])

    @property
    def waiting(self) -> int:
        """How many tasks may be taken."""
        return 0 if self.is_stopped else self.counts[JobState.SUBMITTED]

    @property
    def order(self) -> tuple[int, int, bool, int]:
        """Lower is earlier: by priority, then as submitted; what is run again is behind what was submitted before that."""
        behind = (life.behind if (life := self.next_task()) is not None else None) or 0
        return (-self.terms.priority, behind or self.terms.number, behind > 0, self.terms.number)

    def life(self, index: int | None) -> JobLife:
        """A task as it is now. One that can be taken is `waiting` while GPUs are requested."""
        life = self._lives.get(index) or JobLife(JobKey(self.terms.number, index))
        is_waiting = life.state is JobState.SUBMITTED and self.requested_at is not None and not self.is_stopped
        return replace(life, state=JobState.WAITING) if is_waiting else life

    def lives(self) -> Iterator[JobLife]:
        return map(self.life, self.terms.indices)

    def has(self, index: int | None) -> bool:
        return index in self._places

    def next_task(self) -> JobLife | None:
        """The task to take next; None where none may be taken."""
        while self._ready and not self.is_stopped:
            behind, place = self._ready[0]
            index = self.terms.indices[place]
            life = self._lives.get(index) or JobLife(JobKey(self.terms.number, index))
            if life.state is JobState.SUBMITTED and (life.behind or 0) == behind:
                return life
            heapq.heappop(self._ready)  # it was taken, or is over
        return None

    def running(self, run: str | None = None) -> list[JobLife]:
        """The tasks that run, or the one that this supervisor runs."""
        if not self.counts[JobState.RUNNING]:
            return []
        return [life for life in self._lives.values() if life.state is JobState.RUNNING and run in (None, life.run)]

    # --- events --------------------------------------------------------------------------------------------------------

    def evolve(self, event: JobEvent) -> None:
        """Apply an event; ImpossibleEvent where it cannot have happened."""
        match event:
            case TaskStarted():
                self._start(self._touch(event, event.index, JobState.SUBMITTED), event)
            case TaskEnded():
                self._end(self._touch(event, event.index, JobState.RUNNING), event)
            case Requested():
                self.requested_at = event.at if self.requested_at is None else self.requested_at
                self.requested_by = event.worker
            case RunOpened():
                self.runs[event.run.id] = self.open_runs[event.run.id] = event.run
                self.requested_at = None
            case RunClosed():
                self.open_runs.pop(event.run, None)
                self.yielded_at = event.at if event.is_yielded else self.yielded_at
                if event.usage is not None:
                    self.usage[event.run] = event.usage
            case _:
                for index in self.terms.indices if event.indices is None else event.indices:
                    if index in self._places:
                        life = self._lives.setdefault(index, JobLife(JobKey(self.terms.number, index)))
                        self._apply_to_one(life, event)
        if not self.counts[JobState.SUBMITTED]:
            self.requested_at = None

    def _apply_to_one(self, life: JobLife, event: CancelAsked | TasksClosed | TasksRetried) -> None:
        match event:
            case CancelAsked() if life.state is JobState.RUNNING:
                life.is_cancel_asked = True
            case CancelAsked() if life.state is JobState.SUBMITTED:
                self._close(life, event.at, JobState.CANCELLED)
            case TasksClosed() if life.state is JobState.SUBMITTED:
                self._close(life, event.at, event.becomes, event.why, event.exit_code)
            case TasksRetried() if life.state.is_over:
                life.behind, life.tries, life.preemptions, life.is_cancel_asked = event.behind, 0, 0, False
                self._become(life, JobState.SUBMITTED)

    def _touch(self, event: JobEvent, index: int | None, state: JobState) -> JobLife:
        if index not in self._places:
            raise ImpossibleEvent(f"{type(event).__name__}: there is no task {index}")
        life = self._lives.setdefault(index, JobLife(JobKey(self.terms.number, index)))
        if life.state is not state:
            raise ImpossibleEvent(f"{type(event).__name__} cannot happen to job {life.key}, which is {life.state}")
        return life

    def _start(self, life: JobLife, event: TaskStarted) -> None:
        life.attempts, life.tries = life.attempts + 1, life.tries + 1
        life.started_at, life.ended_at, life.run = event.at, None, event.run
        life.exit_code = life.why = life.end_reason = None
        self._become(life, JobState.RUNNING)

    def _end(self, life: JobLife, event: TaskEnded) -> None:
        was_preempted = event.becomes is JobState.SUBMITTED and event.end_reason == EndReason.PREEMPTED
        life.ended_at, life.exit_code, life.why, life.end_reason = (
            event.at,
            event.exit_code,
            event.why,
            event.end_reason,
        )
        life.tries, life.preemptions = life.tries - was_preempted, life.preemptions + was_preempted
        life.behind = life.behind if event.behind is None else event.behind
        self._become(life, event.becomes)

    def _close(
        self, life: JobLife, at: float, becomes: JobState, why: str | None = None, exit_code: int | None = None
    ) -> None:
        life.ended_at, life.why, life.exit_code, life.end_reason = at, why, exit_code, None
        self._become(life, becomes)

    def _become(self, life: JobLife, state: JobState) -> None:
        self.counts[life.state] -= 1
        self.counts[state] += 1
        life.state = state
        if state is JobState.SUBMITTED:
            heapq.heappush(self._ready, (life.behind or 0, self._places[life.key.index]))


def replay(terms: JobTerms, events: Iterable[JobEvent]) -> Submission:
    submission = Submission(terms)
    for event in events:
        submission.evolve(event)
    return submission


# --- decisions ---------------------------------------------------------------------------------------------------------


def ended(
    submission: Submission,
    life: JobLife,
    at: float,
    exit_code: int | None,
    *,
    why: str | None = None,
    end_reason: str | None = None,
    last_number: int,
) -> TaskEnded:
    """What becomes of a task whose command has ended. One that was to be cancelled is cancelled, and one that was preempted waits
    at its place again, whatever its exit code; one at its time limit has not ended well. One that failed and may be tried again waits behind all that were
    submitted until then, up to `last_number`.
    """
    becomes, behind = JobState.FAILED, None
    if life.is_cancel_asked:
        becomes = JobState.CANCELLED
    elif end_reason == EndReason.PREEMPTED:
        if life.preemptions < MAX_PREEMPTIONS:
            becomes = JobState.SUBMITTED
        else:
            why = f"preempted {life.preemptions + 1} times"
    elif exit_code == 0 and end_reason is None:
        becomes = JobState.ENDED
    elif life.tries <= submission.terms.retries and not submission.is_stopped:
        becomes, behind = JobState.SUBMITTED, last_number
    return TaskEnded(
        at=at,
        index=life.key.index,
        becomes=becomes,
        exit_code=exit_code,
        why=why,
        end_reason=end_reason,
        behind=behind,
    )


def interrupted(life: JobLife, at: float, why: str) -> TaskEnded:
    """What becomes of a task whose command was ended by what ended its supervisor, or the machine. It is not run again by
    itself: what it had done by then is not known.
    """
    becomes = JobState.CANCELLED if life.is_cancel_asked else JobState.INTERRUPTED
    return TaskEnded(at=at, index=life.key.index, becomes=becomes, why=why)


def abandoned(submission: Submission, run: RunFacts, at: float, *, is_same_boot: bool) -> list[JobEvent]:
    """What to write down of a supervisor that is gone and has not said so."""
    how = "its supervisor was killed" if is_same_boot else "the machine was restarted"
    ends = [interrupted(life, at, f"{how} while it ran") for life in submission.running(run.id)]
    return [*ends, RunClosed(at=at, run=run.id)]


def to_retry(submission: Submission, indices: Sequence[int | None], *, has_all: bool) -> list[int | None]:
    """Which of these tasks are run again: those that are over and did not end well; with `has_all`, also those that did."""
    good = () if has_all else (JobState.ENDED,)
    states = {index: submission.life(index).state for index in indices}
    return [index for index, state in states.items() if state.is_over and state not in good]
