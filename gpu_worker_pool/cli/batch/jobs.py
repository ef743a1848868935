"""The jobs of a batch and their states. This module does nothing itself: it decides which job is run next, and the runner runs it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from typing import Final

from gpu_worker_pool.cli.run.attempt import Outcome
from gpu_worker_pool.jobs.life import MAX_PREEMPTIONS


@dataclass(frozen=True, slots=True)
class Job:
    """A line of the file. `key` stays the same when other lines are added or removed."""

    key: str
    line: int
    command: str


# The end reason of a job whose lease was ended for another request.
PREEMPTED: Final = "preempted"


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    DONE_BEFORE = "done before"
    FAILED = "failed"


@dataclass(slots=True)
class Progress:
    job: Job
    state: State = State.WAITING
    attempts: int = 0
    outcome: Outcome | None = None
    # How often it was preempted, in earlier runs too.
    preemptions: int = 0


def read_jobs(text: str) -> list[Job]:
    """One job for each line; blank lines and lines that begin with # are skipped. Only a newline ends a line: str.splitlines
    would also split a command at a form feed or at U+2028. ValueError for a line that cannot be a command.
    """
    seen: Counter[str] = Counter()
    jobs = []
    # Some editors mark a file as UTF-8 by its first character.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        command = line.strip()
        if "\0" in command:
            raise ValueError(f"line {number} has a NUL character, which no command can have")
        if not command or command.startswith("#"):
            continue
        seen[command] += 1
        digest = sha256(command.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        jobs.append(Job(f"{digest}-{seen[command]}", number, command))
    return jobs


@dataclass(slots=True)
class Batch:
    """All jobs, in the order of the file. Each that `next_job` hands out is reported to `ended` or `interrupted`."""

    jobs: list[Job]
    retries: int = 0
    keeps_going: bool = False
    is_stopping: bool = False
    progress: dict[str, Progress] = field(init=False)
    _ready: deque[str] = field(init=False)

    def __post_init__(self) -> None:
        self.progress = {job.key: Progress(job) for job in self.jobs}
        self._ready = deque(self.progress)

    def skip(self, done: Mapping[str, Outcome], preemptions: Mapping[str, int] | None = None) -> None:
        """Leave out the jobs that were done in an earlier run; `preemptions` says how often the others were preempted."""
        for key, number in (preemptions or {}).items():
            if key in self.progress:
                self.progress[key].preemptions = number
        for key, outcome in done.items():
            if key in self.progress:
                self.progress[key].state, self.progress[key].outcome = State.DONE_BEFORE, outcome
        self._ready = deque(key for key in self._ready if self.progress[key].state is State.WAITING)

    def next_job(self) -> Job | None:
        """Take the next job, as running; None where none may be started now."""
        if self.is_stopping or not self._ready:
            return None
        found = self.progress[self._ready.popleft()]
        found.state = State.RUNNING
        found.attempts += 1
        return found.job

    def ended(self, job: Job, outcome: Outcome) -> None:
        """Record an attempt. A job that failed too often stops the batch, unless it keeps going. One that was preempted has
        not failed: it waits at its place again, but not for ever.
        """
        found = self.progress[job.key]
        if outcome.end_reason == PREEMPTED and found.preemptions >= MAX_PREEMPTIONS:
            outcome = replace(outcome, why=f"preempted {found.preemptions + 1} times", end_reason=None)
        found.outcome = outcome
        if outcome.is_good:
            found.state = State.DONE
        elif outcome.end_reason == PREEMPTED:
            found.preemptions += 1
            found.attempts -= 1  # it is not one of those that --retries allows
            found.state = State.WAITING
            self._put_back(job.key)
        elif found.attempts <= self.retries and not self.is_stopping:
            found.state = State.WAITING
            self._ready.append(job.key)  # behind the others: what made it fail may have passed by then
        else:
            found.state = State.FAILED
            self.is_stopping = self.is_stopping or not self.keeps_going

    def _put_back(self, key: str) -> None:
        """Before the jobs that come after it in the file."""
        places = {other: place for place, other in enumerate(self.progress)}
        behind = (number for number, other in enumerate(self._ready) if places[other] > places[key])
        self._ready.insert(next(behind, len(self._ready)), key)

    def interrupted(self, job: Job) -> None:
        """Record that an attempt was interrupted, which does not count as a failure: the job waits for the next run."""
        self.progress[job.key].state = State.WAITING

    def count(self, *states: State) -> int:
        return sum(found.state in states for found in self.progress.values())

    @property
    def done(self) -> int:
        return self.count(State.DONE, State.DONE_BEFORE)
