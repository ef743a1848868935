"""Submissions for the tests of their lives."""

from __future__ import annotations

from typing import Any

from gpu_worker_pool.jobs.life import (
    JobEvent,
    JobState,
    JobTerms,
    RunFacts,
    RunOpened,
    Submission,
    TaskEnded,
    TaskStarted,
    replay,
)

RUN = RunFacts(id="run-1", pid=4711, started=5.0, guard_pid=4712, boot_id="boot", pid_namespace="ns", lease_id="lease")
OPENED = RunOpened(at=2.0, run=RUN)


def submission(number: int = 1, *events: JobEvent, tasks: int | None = None, **terms: Any) -> Submission:
    """One job, or an array of so many tasks, to which this happened."""
    indices = (None,) if tasks is None else tuple(range(tasks))
    return replay(JobTerms(number, indices, **terms), events)


def started(index: int | None = None) -> TaskStarted:
    return TaskStarted(at=2.0, index=index, run=RUN.id)


def became(state: JobState, index: int | None = None, **facts: Any) -> TaskEnded:
    return TaskEnded(at=3.0, index=index, becomes=state, **facts)


def in_state(number: int, state: JobState, **terms: Any) -> Submission:
    """One job in this state."""
    if state in {JobState.SUBMITTED, JobState.WAITING}:
        return submission(number, **terms)
    if state is JobState.RUNNING:
        return submission(number, OPENED, started(), **terms)
    return submission(number, OPENED, started(), became(state), **terms)
