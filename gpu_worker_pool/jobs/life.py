"""The life of a job: its states, the events that change them, and what a job decides to become.

A function below decides and returns an event; `evolve` applies an event and decides nothing. So the events of a job,
replayed, give the same job again: that is how a keeper goes on where another one was killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from gpu_worker_pool.core.model.lease import END_TEXTS, EndReason

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
    """What a job was submitted with, as far as its life depends on it. `after` may name whole arrays."""

    key: JobKey
    priority: int = 0
    retries: int = 0
    after: tuple[JobKey, ...] = ()
    after_failure: AfterFailure = AfterFailure.SKIP
    at_once: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardFacts:
    """The process that guards a job's command and holds its lease, and how to find it again."""

    pid: int
    started: float | None
    boot_id: str
    pid_namespace: str | None
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLease:
    """The lease of an attempt. `limit_at` is the end of its time limit, on the clock of leases. `nodes` are those of its
    `uuids`; empty where they are not known.
    """

    id: str
    url: str | None
    gpus: tuple[int | str, ...]
    uuids: tuple[str, ...]
    is_local: bool
    ttl_s: float
    limit_at: float | None = None
    is_shared: bool = False
    nodes: tuple[str, ...] = ()


# --- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequested:
    """GPUs are being requested for it."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """It has its GPUs, and its command is about to start. This is written before the command starts."""

    at: float
    guard: GuardFacts
    lease: RunLease


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNotStarted:
    """The guard says that the command was never started: the job may be run."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageMeasured:
    """The most memory and the highest utilization of its GPUs so far, and the mean utilization; None: unknown."""

    at: float
    peak_memory_mb: float | None
    peak_utilization_percent: float | None
    mean_utilization_percent: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """No process of its command is left, and the job `becomes` something else."""

    at: float
    becomes: JobState
    exit_code: int | None = None
    why: str | None = None
    end_reason: str | None = None
    behind: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAsked:
    """Its user wants it cancelled; its command is being ended."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClosed:
    """It is over without a run: cancelled, skipped, or failed because it can have no GPU."""

    at: float
    becomes: JobState
    why: str | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRetried:
    """Its user wants it run again, behind the submissions up to `behind`."""

    at: float
    behind: int


JobEvent = JobRequested | RunStarted | RunNotStarted | UsageMeasured | RunEnded | CancelAsked | JobClosed | JobRetried


class ImpossibleEvent(ValueError):  # noqa: N818 - it is about the event
    """An event that a job in this state cannot have: its journal is damaged."""


# --- state -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobLife:
    """A job as its events have made it. Times are seconds since 1970; those of a run are of the last one."""

    terms: JobTerms
    state: JobState = JobState.SUBMITTED
    attempts: int = 0
    # Attempts that count for the retries: not those that were preempted, nor those before its user had it run again.
    tries: int = 0
    preemptions: int = 0
    behind: int | None = None
    is_cancel_asked: bool = False
    requested_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    guard: GuardFacts | None = None
    lease: RunLease | None = None
    usage: UsageMeasured | None = None
    exit_code: int | None = None
    why: str | None = None
    end_reason: str | None = None

    @property
    def key(self) -> JobKey:
        return self.terms.key

    @property
    def order(self) -> tuple[int, int, bool, JobKey]:
        """Lower is earlier: by priority, then as submitted; what is run again is behind what was submitted before that."""
        key = self.key
        index = JobKey(key.number, key.index or 0)
        return (-self.terms.priority, self.behind or key.number, self.behind is not None, index)


def evolve(life: JobLife, event: JobEvent) -> JobLife:
    """The job after this event; ImpossibleEvent where it cannot have happened to it."""
    state = life.state
    match event:
        case JobRequested(at=at) if state in {JobState.SUBMITTED, JobState.WAITING}:
            # A keeper that takes over requests again; the wait goes on.
            first_at = at if life.requested_at is None else life.requested_at
            return replace(life, state=JobState.WAITING, requested_at=first_at)
        case RunStarted(at=at) if state is JobState.WAITING:
            return replace(
                _without_run(life, 1), state=JobState.RUNNING, started_at=at, guard=event.guard, lease=event.lease
            )
        case RunNotStarted() if state is JobState.RUNNING:
            return replace(_without_run(life, -1), state=JobState.SUBMITTED)
        case UsageMeasured() if state is JobState.RUNNING:
            return replace(life, usage=event)
        case CancelAsked() if state is JobState.RUNNING:
            return replace(life, is_cancel_asked=True)
        case RunEnded() if state is JobState.RUNNING and event.becomes is not JobState.RUNNING:
            return _after_run(life, event)
        case JobClosed() if state in {JobState.SUBMITTED, JobState.WAITING} and event.becomes.is_over:
            life = replace(life, state=event.becomes, why=event.why, exit_code=event.exit_code, ended_at=event.at)
            return replace(life, end_reason=None)
        case JobRetried() if state.is_over:
            life = replace(life, state=JobState.SUBMITTED, behind=event.behind, tries=0, preemptions=0)
            return replace(life, is_cancel_asked=False, requested_at=None)
    raise ImpossibleEvent(f"{type(event).__name__} cannot happen to job {life.key}, which is {state}")


def _without_run(life: JobLife, counted: int) -> JobLife:
    """The job without the facts of a run, and with so many more attempts."""
    life = replace(life, attempts=life.attempts + counted, tries=life.tries + counted)
    life = replace(life, started_at=None, ended_at=None, guard=None, lease=None, usage=None)
    return replace(life, exit_code=None, why=None, end_reason=None)


def _after_run(life: JobLife, event: RunEnded) -> JobLife:
    was_preempted = event.becomes is JobState.SUBMITTED and event.end_reason == EndReason.PREEMPTED
    return replace(
        life,
        state=event.becomes,
        ended_at=event.at,
        exit_code=event.exit_code,
        why=event.why,
        end_reason=event.end_reason,
        behind=life.behind if event.behind is None else event.behind,
        tries=life.tries - was_preempted,
        preemptions=life.preemptions + was_preempted,
        guard=None,
        requested_at=None,
    )


def resumed(life: JobLife) -> JobLife:
    """The job for a keeper that takes over: what waited has to be requested again."""
    return replace(life, state=JobState.SUBMITTED) if life.state is JobState.WAITING else life


def replay(terms: JobTerms, events: Iterable[JobEvent]) -> JobLife:
    life = JobLife(terms)
    for event in events:
        life = evolve(life, event)
    return life


# --- decisions ---------------------------------------------------------------------------------------------------------


def ended(
    life: JobLife, at: float, exit_code: int | None, why: str | None, end_reason: str | None, *, last_number: int
) -> RunEnded:
    """What becomes of a job whose command has ended. One that was preempted waits at its place again; one that failed and
    may be tried again waits behind all that were submitted until then, up to `last_number`.
    """
    becomes, behind = JobState.FAILED, None
    if exit_code == 0:
        becomes = JobState.ENDED
    elif life.is_cancel_asked:
        becomes = JobState.CANCELLED
    elif end_reason == EndReason.PREEMPTED:
        if life.preemptions < MAX_PREEMPTIONS:
            becomes = JobState.SUBMITTED
        else:
            why = f"preempted {life.preemptions + 1} times"
    elif life.tries <= life.terms.retries:
        becomes, behind = JobState.SUBMITTED, last_number
    return RunEnded(at=at, becomes=becomes, exit_code=exit_code, why=why, end_reason=end_reason, behind=behind)


def interrupted(life: JobLife, at: float, why: str, exit_code: int | None = None) -> RunEnded:
    """What becomes of a job whose command was ended by what ended its guard, or the machine. It is not run again by
    itself: what it had done by then is not known.
    """
    becomes = JobState.CANCELLED if life.is_cancel_asked else JobState.INTERRUPTED
    return RunEnded(at=at, becomes=becomes, exit_code=exit_code, why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOutcome:
    """What a guard wrote down: whether the command was started, and how it ended."""

    is_started: bool
    exit_code: int | None = None
    was_late: bool = False
    was_limited: bool = False
    # Why the lease was to end, where the command had been warned.
    warned_of: EndReason | None = None
    ended_at: float | None = None


def found_again(
    life: JobLife, at: float, outcome: GuardOutcome | None, *, is_same_boot: bool, last_number: int
) -> RunEnded | RunNotStarted:
    """What became of a job whose guard is gone, by what that guard wrote down; None: it wrote nothing."""
    if outcome is None:
        how = "its guard was killed" if is_same_boot else "the machine was restarted"
        return interrupted(life, at, f"{how} while it ran")
    if not outcome.is_started:
        return RunNotStarted(at=at)
    ended_at, code = outcome.ended_at or at, outcome.exit_code
    if not is_same_boot and code is not None and code > SIGNAL_BASE:
        return interrupted(life, ended_at, "the machine was restarted while it ran", code)
    if outcome.was_late:
        return ended(
            life,
            ended_at,
            None,
            "its GPU was lost: the lease could not be renewed in time",
            None,
            last_number=last_number,
        )
    reason = outcome.warned_of or (EndReason.TIME_LIMIT if outcome.was_limited else None)
    reason = None if code == 0 else reason
    why = None if reason is None else END_TEXTS.get(reason, reason)
    return ended(life, ended_at, None if reason else code, why, reason, last_number=last_number)


def cancel(life: JobLife, at: float) -> JobClosed | CancelAsked | None:
    """None where there is nothing to do: it is over, or being cancelled."""
    if life.state is JobState.RUNNING:
        return None if life.is_cancel_asked else CancelAsked(at=at)
    return None if life.state.is_over else JobClosed(at=at, becomes=JobState.CANCELLED)


def retry(life: JobLife, at: float, last_number: int) -> JobRetried | None:
    """None where it is not over yet."""
    return JobRetried(at=at, behind=last_number) if life.state.is_over else None
