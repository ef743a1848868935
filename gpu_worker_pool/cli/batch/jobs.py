"""The jobs of a batch, and what becomes of each. Pure: what is run, and when, is decided here and done elsewhere."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class Job:
    """A line of the file. `key` stays the same where other lines are added or taken away."""

    key: str
    line: int
    command: str


class State(StrEnum):
    """How far a job has come."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    DONE_BEFORE = "done before"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt at a job went. `exit_code` is None where it was not run to its end, and `why` says why."""

    exit_code: int | None
    why: str | None = None
    gpus: tuple[int | str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None
    log: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether the job is done."""
        return self.exit_code == 0

    @property
    def took_s(self) -> float | None:
        """How long it ran; None where it did not."""
        if self.started_at is None or self.ended_at is None:
            return None
        return max(self.ended_at - self.started_at, 0.0)


@dataclass(slots=True)
class Progress:
    """One job so far."""

    job: Job
    state: State = State.WAITING
    attempts: int = 0
    outcome: Outcome | None = None


def read_jobs(text: str) -> list[Job]:
    """One command a line; blank lines and those that begin with # are none."""
    seen: Counter[str] = Counter()
    jobs = []
    for number, line in enumerate(text.splitlines(), start=1):
        command = line.strip()
        if not command or command.startswith("#"):
            continue
        seen[command] += 1
        digest = sha256(command.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        jobs.append(Job(f"{digest}-{seen[command]}", number, command))
    return jobs


@dataclass(slots=True)
class Batch:
    """All jobs, in the order of the file. `next_job` is what to run now; `ended` says how it went."""

    jobs: list[Job]
    retries: int = 0
    keeps_going: bool = False
    is_stopping: bool = False
    progress: dict[str, Progress] = field(init=False)
    _ready: deque[str] = field(init=False)

    def __post_init__(self) -> None:
        self.progress = {job.key: Progress(job) for job in self.jobs}
        self._ready = deque(self.progress)

    def skip(self, done: Mapping[str, Outcome]) -> None:
        """These were done in an earlier run."""
        for key, outcome in done.items():
            if key in self.progress:
                self.progress[key].state, self.progress[key].outcome = State.DONE_BEFORE, outcome
        self._ready = deque(key for key in self._ready if self.progress[key].state is State.WAITING)

    def next_job(self) -> Job | None:
        """Take the next one; None where there is none to be started now."""
        if self.is_stopping or not self._ready:
            return None
        found = self.progress[self._ready.popleft()]
        found.state = State.RUNNING
        found.attempts += 1
        return found.job

    def ended(self, job: Job, outcome: Outcome) -> None:
        """An attempt is over. Where it failed too often and we do not keep going, nothing more is started."""
        found = self.progress[job.key]
        found.outcome = outcome
        if outcome.is_good:
            found.state = State.DONE
        elif found.attempts <= self.retries and not self.is_stopping:
            found.state = State.WAITING
            self._ready.append(job.key)  # behind the others: what hindered it may have passed by then
        else:
            found.state = State.FAILED
            self.is_stopping = self.is_stopping or not self.keeps_going

    def interrupted(self, job: Job) -> None:
        """It was broken off, which is not its fault: it waits for the next run."""
        self.progress[job.key].state = State.WAITING

    def count(self, *states: State) -> int:
        """How many jobs are in one of these states."""
        return sum(found.state in states for found in self.progress.values())

    @property
    def done(self) -> int:
        """How many are done, in this run or before."""
        return self.count(State.DONE, State.DONE_BEFORE)

    def failed(self) -> Iterable[Progress]:
        """Those that failed."""
        return (found for found in self.progress.values() if found.state is State.FAILED)
