"""A submission: one job, or an array of tasks, with what became of each; and which submissions are next.

Its state is a few small records: one for each task, one for each supervisor, and one for the whole. A change is a new record,
which replaces the one before: the journal has them in the order in which they were written. The functions below decide which
records to write, and change nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import EndReason

from .job_spec import AfterFailure, JobKey, JobSpec

# How often a job that was preempted, or was stopped at its time limit, is run again.
MAX_RESTARTS: Final = 100
BEGIN: Final = "its --begin"
OUT_OF_MEMORY: Final = "out_of_memory"
# How many requests of one user wait in the queues of the servers at once; each has a process of its own. The others wait
# in the keeper, in their order.
MOST_WAITING: Final = 256
# What a dependency that is no longer known counts as.
_FORGOTTEN: Final = "forgotten"


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
# What became of a dependency that has not ended well, in words.
_BAD: Final[dict[str, str]] = {
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
    JobState.INTERRUPTED: "was interrupted",
    JobState.SKIPPED: "was skipped",
    _FORGOTTEN: "is no longer known",
}


# --- records -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobTask:
    """A task. Times are seconds since 1970; those of a run are of the last one.

    `tries` are the attempts that count for the retries: not those that were `restarts`, nor those before its user had it run
    again. `behind`: it waits behind the submissions up to that number.
    """

    index: int | None = None
    state: JobState = JobState.SUBMITTED
    attempts: int = 0
    tries: int = 0
    restarts: int = 0
    behind: int = 0
    is_cancel_asked: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    run: str | None = None
    exit_code: int | None = None
    why: str | None = None
    end_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The most memory and the highest utilization of the GPUs of a lease, and the mean utilization; None: unknown."""

    peak_memory_mb: float | None = None
    peak_utilization_percent: float | None = None
    mean_utilization_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A supervisor, its guard, and the lease that they have: how to find the processes again, and what the tasks run on.

    `nodes` are those of the `uuids`; empty where they are not known. While it `is_open` it may take tasks. `usage` is known once
    the lease has ended.
    """

    id: str
    is_open: bool = True
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
    usage: Usage | None = None

    @property
    def supervisor(self) -> ProcessId:
        return ProcessId(self.pid, self.started)

    @property
    def guard(self) -> ProcessId:
        return ProcessId(self.guard_pid, self.guard_started)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What is known of a submission as a whole.

    `requested_at` is since when GPUs are requested for its next task, by a worker of the name `requested_by`; None while none
    are. `yielded_at` is when a supervisor last released its GPUs for another request. `is_held`: its user lets no more of it
    start. `first_at` is when its user put it before the others, 0 if never. `edits` are the fields of its spec that its user
    has changed.
    """

    requested_at: float | None = None
    requested_by: str = ""
    yielded_at: float = 0.0
    is_held: bool = False
    first_at: float = 0.0
    edits: Mapping[str, Any] = field(default_factory=dict)


Record = JobTask | Run | Whole


class Submission:
    """All records of one submission, as they are now. `apply` changes it, and nothing else does."""

    def __init__(self, number: int, spec: JobSpec) -> None:
        self.number = number
        self._submitted = self.spec = spec
        self.whole = Whole()
        self.runs: dict[str, Run] = {}
        self.counts: Counter[JobState] = Counter({JobState.SUBMITTED: len(spec.indices)})
        # Tasks to which nothing has happened are not in it.
        self._tasks: dict[int | None, JobTask] = {}
        self._places = {index: place for place, index in enumerate(spec.indices)}
        # A heap of what may be taken, by place; what is run again after a failure is behind all others.
        self._ready = [(0, place) for place in range(len(spec.indices))]

    def apply(self, record: Record) -> None:
        """Let a record replace the one before. ValueError where there is no such task."""
        match record:
            case JobTask():
                before = self.task(record.index)
                self.counts[before.state] -= 1
                self.counts[record.state] += 1
                self._tasks[record.index] = record
                if record.state is JobState.SUBMITTED:
                    heapq.heappush(self._ready, (record.behind, self._places[record.index]))
            case Run():
                self.runs[record.id] = record
            case Whole():
                self.whole = record
                self.spec = replace(self._submitted, **record.edits)

    @property
    def open_runs(self) -> dict[str, Run]:
        """The supervisors that may still take tasks."""
        return {id_: run for id_, run in self.runs.items() if run.is_open}

    @property
    def is_over(self) -> bool:
        return not (self.counts[JobState.SUBMITTED] or self.counts[JobState.RUNNING])

    @property
    def is_stopped(self) -> bool:
        """Whether no further task is started, because one has failed."""
        return self.spec.stops_on_failure and bool(self.counts[JobState.FAILED] or self.counts[JobState.INTERRUPTED])

    @property
    def waiting(self) -> int:
        """How many tasks may be taken."""
        return 0 if self.is_stopped or self.whole.is_held else self.counts[JobState.SUBMITTED]

    @property
    def requested_at(self) -> float | None:
        return self.whole.requested_at if self.waiting else None

    @property
    def order(self) -> tuple[float, int, int, bool, int]:
        """Lower is earlier: what its user put first, then by priority, then as submitted; what is run again is behind what was
        submitted before that.
        """
        behind = 0 if (task := self.next_task()) is None else task.behind
        return (-self.whole.first_at, -self.spec.priority, behind or self.number, behind > 0, self.number)

    def key(self, task: JobTask) -> JobKey:
        return JobKey(self.number, task.index)

    def task(self, index: int | None) -> JobTask:
        """A task, as its record is. ValueError where there is none."""
        if index not in self._places:
            raise ValueError(f"there is no task {index}")
        return self._tasks.get(index) or JobTask(index)

    def shown(self, index: int | None) -> JobTask:
        """The same for people: a task that can be taken is `waiting` while GPUs are requested."""
        task = self.task(index)
        is_waiting = task.state is JobState.SUBMITTED and self.requested_at is not None
        return replace(task, state=JobState.WAITING) if is_waiting else task

    def tasks(self) -> Iterator[JobTask]:
        return map(self.shown, self.spec.indices)

    def has(self, index: int | None) -> bool:
        return index in self._places

    def next_task(self) -> JobTask | None:
        """The task to take next; None where none may be taken."""
        while self._ready and self.waiting:
            behind, place = self._ready[0]
            task = self.task(self.spec.indices[place])
            if task.state is JobState.SUBMITTED and task.behind == behind:
                return task
            heapq.heappop(self._ready)  # it was taken, or is over
        return None

    def running(self, run: str | None = None) -> list[JobTask]:
        """The tasks that run, or the one that this supervisor runs."""
        if not self.counts[JobState.RUNNING]:
            return []
        return [task for task in self._tasks.values() if task.state is JobState.RUNNING and run in (None, task.run)]


# --- decisions ---------------------------------------------------------------------------------------------------------


def started(task: JobTask, at: float, run: str) -> JobTask:
    return replace(
        task,
        state=JobState.RUNNING,
        attempts=task.attempts + 1,
        tries=task.tries + 1,
        started_at=at,
        ended_at=None,
        run=run,
        exit_code=None,
        why=None,
        end_reason=None,
    )


def ended(
    submission: Submission,
    task: JobTask,
    at: float,
    exit_code: int | None,
    *,
    why: str | None = None,
    end_reason: str | None = None,
    last_number: int,
) -> JobTask:
    """What becomes of a task whose command has ended. One that was to be cancelled is cancelled, and one that was preempted waits
    at its place again, whatever its exit code. One at its time limit has not ended well, or is run again where it is to be. What
    failed and may be tried again waits behind all that were submitted until then, up to `last_number`.
    """
    spec = submission.spec
    is_restart = end_reason == EndReason.PREEMPTED or (end_reason == EndReason.TIME_LIMIT and spec.is_requeued)
    over = replace(task, ended_at=at, exit_code=exit_code, why=why, end_reason=end_reason)
    if task.is_cancel_asked:
        return replace(over, state=JobState.CANCELLED)
    if is_restart and task.restarts < MAX_RESTARTS:
        behind = task.behind if end_reason == EndReason.PREEMPTED else last_number
        return replace(over, state=JobState.SUBMITTED, behind=behind, tries=task.tries - 1, restarts=task.restarts + 1)
    if is_restart:
        how = "preempted" if end_reason == EndReason.PREEMPTED else "stopped at its time limit"
        return replace(over, state=JobState.FAILED, why=f"{how} {task.restarts + 1} times")
    if exit_code == 0 and end_reason is None:
        return replace(over, state=JobState.ENDED)
    if task.tries <= spec.retries and not submission.is_stopped:
        return replace(over, state=JobState.SUBMITTED, behind=last_number)
    return replace(over, state=JobState.FAILED)


def _over(task: JobTask, state: JobState, at: float, why: str | None = None, exit_code: int | None = None) -> JobTask:
    return replace(task, state=state, ended_at=at, why=why, exit_code=exit_code, end_reason=None)


def interrupted(task: JobTask, at: float, why: str) -> JobTask:
    """What becomes of a task whose command was ended by what ended its supervisor, or the machine. It is not run again by
    itself: what it had done by then is not known.
    """
    return _over(task, JobState.CANCELLED if task.is_cancel_asked else JobState.INTERRUPTED, at, why)


def abandoned(submission: Submission, run: Run, at: float, *, is_same_boot: bool) -> list[Record]:
    """What to write down of a supervisor that is gone and has not said so."""
    how = "its supervisor was killed" if is_same_boot else "the machine was restarted"
    ends = [interrupted(task, at, f"{how} while it ran") for task in submission.running(run.id)]
    return [*ends, replace(run, is_open=False)]


def cancelled(submission: Submission, at: float, indices: Iterable[int | None]) -> list[JobTask]:
    """Those of these tasks that wait are cancelled; those that run are being ended."""
    changed = []
    for task in map(submission.task, indices):
        if task.state is JobState.RUNNING and not task.is_cancel_asked:
            changed.append(replace(task, is_cancel_asked=True))
        elif task.state is JobState.SUBMITTED:
            changed.append(_over(task, JobState.CANCELLED, at))
    return changed


def closed(
    submission: Submission, at: float, becomes: JobState, why: str | None, exit_code: int | None = None
) -> list[JobTask]:
    """What waits is over without a run: skipped, or failed because it can have no GPU."""
    tasks = map(submission.task, submission.spec.indices)
    return [_over(task, becomes, at, why, exit_code) for task in tasks if task.state is JobState.SUBMITTED]


def retried(submission: Submission, indices: Sequence[int | None], behind: int, *, has_all: bool) -> list[JobTask]:
    """Those of these tasks that are over and did not end well wait again; with `has_all`, also those that did."""
    good = () if has_all else (JobState.ENDED,)
    over = [task for task in map(submission.task, indices) if task.state.is_over and task.state not in good]
    return [
        replace(task, state=JobState.SUBMITTED, behind=behind, tries=0, restarts=0, is_cancel_asked=False)
        for task in over
    ]


# --- which are next ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """What a submission waits for, in words; and why it is to be skipped, where it is."""

    waits_for: str
    skip: str | None = None


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What to do now: skip some submissions, withdraw the requests of others, and request GPUs for the rest, in this order."""

    skip: Mapping[int, str]
    withdraw: tuple[int, ...] = ()
    request: tuple[int, ...] = ()


def make_plan(
    submissions: Mapping[int, Submission],
    requests: Mapping[int, int],
    starting: Mapping[int, int],
    now: float,
    most_waiting: int = MOST_WAITING,
) -> JobPlan:
    """Submissions that nothing holds back, in their order, each with one request at a time: until every task has a
    supervisor, or as many as its array allows. `requests` is how many requests of a submission wait, and `starting` how many
    supervisors have their GPUs and have not taken a task yet.
    """
    skip: dict[int, str] = {}
    wanting: list[Submission] = []
    for number, submission in submissions.items():
        hold = what_holds(submission, submissions, now) if submission.waiting else None
        if hold is not None and hold.skip is not None:
            skip[number] = hold.skip
        elif hold is None and _wants_more(submission, starting.get(number, 0)):
            wanting.append(submission)
    wanted = {submission.number for submission in wanting}
    withdraw = tuple(number for number, count in requests.items() if count and number not in wanted)
    room = most_waiting - sum(requests.values()) + len(withdraw)
    new = [submission for submission in wanting if not requests.get(submission.number)]
    new.sort(key=lambda submission: submission.order)
    return JobPlan(skip, withdraw, tuple(submission.number for submission in new[: max(room, 0)]))


def _wants_more(submission: Submission, starting: int) -> bool:
    at_once, busy = submission.spec.at_once, len(submission.open_runs) + starting
    has_room = at_once is None or busy < at_once
    return submission.waiting > starting and has_room and not submission.spec.is_inside


def what_holds(submission: Submission, others: Mapping[int, Submission], now: float) -> Hold | None:
    """What holds it back: its user, its --begin, or jobs of --after; None where it may run."""
    spec, pending = submission.spec, []
    for before in spec.after_keys:
        states = _states(before, others.get(before.number))
        bad = next((state for state in states if state in _BAD), None)
        if bad is not None and spec.after_failure is AfterFailure.SKIP:
            return Hold(f"after {before}", f"job {before} {_BAD[bad]}")
        is_done = not any(state in _LIVE for state in states)
        if not is_done or (bad is not None and spec.after_failure is AfterFailure.WAIT):
            pending.append(str(before))
    if submission.whole.is_held:
        return Hold(f"held; `gpu-pool jobs release {submission.number}` lets it go on")
    if pending:
        return Hold(f"after {', '.join(pending)}")
    if spec.begin_at is not None and now < spec.begin_at:
        return Hold(BEGIN)
    return None


def _states(before: JobKey, submission: Submission | None) -> list[str]:
    if submission is None or not (before.index is None or submission.has(before.index)):
        return [_FORGOTTEN]
    if before.index is not None:
        return [submission.task(before.index).state]
    return [state for state, count in submission.counts.items() if count]
