"""Which of a user's jobs are requested now, and which are skipped: a function of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .job_key import JobKey
from .life import AfterFailure, JobLife, JobState

# How many requests of one user wait in the queues of the servers at once; each has a process of its own. The others wait
# in the keeper, in their order.
MOST_WAITING: Final = 256
# What a dependency that is no longer known counts as.
_FORGOTTEN: Final = "forgotten"
# What became of a dependency that has not ended well, in words.
_BAD: Final[dict[str, str]] = {
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
    JobState.INTERRUPTED: "was interrupted",
    JobState.SKIPPED: "was skipped",
    _FORGOTTEN: "is no longer known",
}
_UNFINISHED: Final = frozenset({JobState.SUBMITTED, JobState.WAITING, JobState.RUNNING})


@dataclass(frozen=True, slots=True)
class SkippedJob:
    """A job to skip, and why."""

    key: JobKey
    why: str


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What to do now: skip some jobs, and request GPUs for others, in this order."""

    skip: tuple[SkippedJob, ...] = ()
    request: tuple[JobKey, ...] = ()


def make_plan(lives: Mapping[JobKey, JobLife], most_waiting: int = MOST_WAITING) -> JobPlan:
    """Jobs whose dependencies allow it, in their order: as many as may wait at once, and as their arrays allow."""
    tasks: dict[int, list[JobLife]] = {}
    for life in lives.values():
        tasks.setdefault(life.key.number, []).append(life)
    busy = Counter(life.key.number for life in lives.values() if life.state in {JobState.WAITING, JobState.RUNNING})
    room = most_waiting - sum(life.state is JobState.WAITING for life in lives.values())
    skip: list[SkippedJob] = []
    request: list[JobKey] = []
    submitted = (life for life in lives.values() if life.state is JobState.SUBMITTED)
    for life in sorted(submitted, key=lambda found: found.order):
        verdict = why_not_yet(life, tasks)
        if isinstance(verdict, SkippedJob):
            skip.append(verdict)
        elif verdict is None and len(request) < room:
            number, at_once = life.key.number, life.terms.at_once
            if at_once is None or busy[number] < at_once:
                busy[number] += 1
                request.append(life.key)
    return JobPlan(tuple(skip), tuple(request))


def why_not_yet(life: JobLife, tasks: Mapping[int, Sequence[JobLife]]) -> SkippedJob | str | None:
    """None where its dependencies let it run; the ids it waits for; or that it is to be skipped."""
    terms, pending = life.terms, []
    for before in terms.after:
        states = _states(before, tasks.get(before.number, ()))
        bad = next((state for state in states if state in _BAD), None)
        if bad is not None and terms.after_failure is AfterFailure.SKIP:
            return SkippedJob(life.key, f"job {before} {_BAD[bad]}")
        is_done = not any(state in _UNFINISHED for state in states)
        if not is_done or (bad is not None and terms.after_failure is AfterFailure.WAIT):
            pending.append(str(before))
    return ", ".join(pending) or None


def _states(before: JobKey, lives: Iterable[JobLife]) -> list[str]:
    return [life.state for life in lives if before.includes(life.key)] or [_FORGOTTEN]
