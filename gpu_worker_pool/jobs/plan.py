"""For which of a user's submissions GPUs are requested now, and which are skipped: a function of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .job_key import JobKey
from .life import AfterFailure, JobState, Submission

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
class Hold:
    """What a submission waits for: these ids of --after; or that it is to be skipped, and `why`."""

    after: str
    why: str | None = None


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
    most_waiting: int = MOST_WAITING,
) -> JobPlan:
    """Submissions whose dependencies allow it, in their order, each with one request at a time: until every task has a
    supervisor, or as many as its array allows. `requests` is how many requests of a submission wait, and `starting` how many
    supervisors have their GPUs and have not taken a task yet.
    """
    skip: dict[int, str] = {}
    wanting: list[Submission] = []
    for number, submission in submissions.items():
        if not submission.waiting:
            continue
        hold = what_holds(submission, submissions)
        if hold is not None and hold.why is not None:
            skip[number] = hold.why
        elif hold is None and _wants_more(submission, starting.get(number, 0)):
            wanting.append(submission)
    wanted = {submission.terms.number for submission in wanting}
    withdraw = tuple(number for number, count in requests.items() if count and number not in wanted)
    room = most_waiting - sum(requests.values()) + len(withdraw)
    new = [submission for submission in wanting if not requests.get(submission.terms.number)]
    new.sort(key=lambda submission: submission.order)
    return JobPlan(skip, withdraw, tuple(submission.terms.number for submission in new[: max(room, 0)]))


def _wants_more(submission: Submission, starting: int) -> bool:
    at_once, busy = submission.terms.at_once, len(submission.open_runs) + starting
    return submission.waiting > starting and (at_once is None or busy < at_once)


def what_holds(submission: Submission, others: Mapping[int, Submission]) -> Hold | None:
    """Which jobs of --after hold it back; None where it may run."""
    terms, pending = submission.terms, []
    for before in terms.after:
        states = _states(before, others.get(before.number))
        bad = next((state for state in states if state in _BAD), None)
        if bad is not None and terms.after_failure is AfterFailure.SKIP:
            return Hold(str(before), f"job {before} {_BAD[bad]}")
        is_done = not any(state in _UNFINISHED for state in states)
        if not is_done or (bad is not None and terms.after_failure is AfterFailure.WAIT):
            pending.append(str(before))
    return Hold(", ".join(pending)) if pending else None


def _states(before: JobKey, submission: Submission | None) -> list[str]:
    if submission is None or not (before.index is None or submission.has(before.index)):
        return [_FORGOTTEN]
    if before.index is not None:
        return [submission.life(before.index).state]
    return [state for state, count in submission.counts.items() if count]
