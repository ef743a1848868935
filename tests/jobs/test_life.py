"""The life of a job, event by event and by random histories."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.jobs.job_key import JobKey, parse_key
from gpu_worker_pool.jobs.life import (
    MAX_PREEMPTIONS,
    CancelAsked,
    ImpossibleEvent,
    JobClosed,
    JobEvent,
    JobLife,
    JobRequested,
    JobRetried,
    JobState,
    JobTerms,
    RunEnded,
    RunNotStarted,
    RunStarted,
    UsageMeasured,
    cancel,
    ended,
    evolve,
    interrupted,
    replay,
    retry,
)

from .lives import STARTED, after, failed, job, running

ACTIONS = st.sampled_from(
    ["request", "start", "crash before the start", "good", "bad", "preempted", "died", "cancel", "retry", "measured"]
)


def decided(life: JobLife, action: str, last_number: int) -> JobEvent | None:
    """What a keeper would write down if this happened; None where it would write nothing."""
    is_running = life.state is JobState.RUNNING
    match action:
        case "request":
            return JobRequested(at=1.0) if life.state is JobState.SUBMITTED else None
        case "start":
            return STARTED if life.state is JobState.WAITING else None
        case "cancel":
            return cancel(life, 4.0)
        case "retry":
            return retry(life, 5.0, last_number)
        case "measured":
            used = UsageMeasured(at=2.5, peak_memory_mb=1.0, peak_utilization_percent=2.0, mean_utilization_percent=1.0)
            return used if is_running else None
        case "crash before the start":
            return RunNotStarted(at=3.0) if is_running else None
        case "died":
            return interrupted(life, 3.0, "the machine was restarted") if is_running else None
    code, reason = {"good": (0, None), "bad": (1, None), "preempted": (None, "preempted")}[action]
    return ended(life, 3.0, code, None, reason, last_number=last_number) if is_running else None


@given(st.lists(ACTIONS, max_size=60), st.integers(0, 2))
def test_a_history_replayed_gives_the_same_job_and_no_run_begins_before_the_last_one_ended(
    actions: list[str], retries: int
) -> None:
    terms = JobTerms(JobKey(7), retries=retries)
    life, events, runs, is_open = JobLife(terms), list[JobEvent](), 0, False
    for number, action in enumerate(actions):
        event = decided(life, action, last_number=7 + number)
        if event is None:
            continue
        was_over = life.state.is_over
        life = evolve(life, event)
        events.append(event)
        assert not was_over or isinstance(event, JobRetried)
        if isinstance(event, RunStarted):
            assert not is_open
            runs, is_open = runs + 1, True
        elif isinstance(event, RunEnded | RunNotStarted):
            is_open = False
            runs -= isinstance(event, RunNotStarted)
        assert is_open == (life.state is JobState.RUNNING)
        assert is_open == (life.guard is not None)
        assert 0 <= life.tries <= retries + 1
        assert life.attempts == runs
    assert replay(terms, events) == life


@pytest.mark.parametrize("state", JobState)
def test_an_event_that_cannot_be_is_refused(state: JobState) -> None:
    life = replace(running(), state=state)
    possible = {
        JobState.SUBMITTED: {JobRequested, JobClosed},
        JobState.WAITING: {JobRequested, JobClosed, RunStarted},
        JobState.RUNNING: {RunEnded, RunNotStarted, CancelAsked, UsageMeasured},
    }.get(state, {JobRetried})
    every: list[JobEvent] = [
        JobRequested(at=1.0),
        STARTED,
        RunNotStarted(at=1.0),
        UsageMeasured(at=1.0, peak_memory_mb=None, peak_utilization_percent=None, mean_utilization_percent=None),
        RunEnded(at=1.0, becomes=JobState.ENDED),
        CancelAsked(at=1.0),
        JobClosed(at=1.0, becomes=JobState.SKIPPED),
        JobRetried(at=1.0, behind=3),
    ]
    for event in every:
        if type(event) in possible:
            evolve(life, event)
        else:
            with pytest.raises(ImpossibleEvent, match=f"which is {state}"):
                evolve(life, event)


def test_a_job_that_failed_is_run_again_as_often_as_its_retries_say() -> None:
    life = running(3, retries=1)
    first = ended(life, 9.0, 1, None, None, last_number=8)
    assert (first.becomes, first.behind) == (JobState.SUBMITTED, 8)
    life = after(life, first, JobRequested(at=10.0), STARTED)
    assert ended(life, 11.0, 1, None, None, last_number=8).becomes is JobState.FAILED


def test_a_preempted_job_keeps_its_place_and_its_retries_but_not_for_ever() -> None:
    life = running(3)
    event = ended(life, 9.0, None, "preempted", "preempted", last_number=8)
    assert (event.becomes, event.behind) == (JobState.SUBMITTED, None)
    assert after(life, event).tries == 0
    often = replace(life, preemptions=MAX_PREEMPTIONS)
    last = ended(often, 9.0, None, "preempted", "preempted", last_number=8)
    assert (last.becomes, last.why) == (JobState.FAILED, "preempted 101 times")


def test_a_cancelled_run_is_cancelled_also_where_its_end_was_not_seen() -> None:
    life = after(running(), CancelAsked(at=3.0))
    assert ended(life, 4.0, 143, None, None, last_number=1).becomes is JobState.CANCELLED
    assert interrupted(life, 4.0, "its guard died").becomes is JobState.CANCELLED
    assert ended(life, 4.0, 0, None, None, last_number=1).becomes is JobState.ENDED  # it was quicker
    assert cancel(life, 5.0) is None


def test_a_job_that_is_over_is_neither_cancelled_nor_run_again_by_itself() -> None:
    life = failed()
    assert cancel(life, 5.0) is None
    assert retry(running(), 5.0, 3) is None
    again = after(life, JobRetried(at=5.0, behind=4))
    assert (again.state, again.tries, again.attempts) == (JobState.SUBMITTED, 0, 1)
    assert again.order > job(4).order
    assert again.order < job(5).order


def test_ids_are_read_as_they_are_written() -> None:
    for text in ("1", "12", "12_0", "12_31"):
        assert str(parse_key(text)) == text
    for text in ("", "0", "12_", "_3", "12-3", "a", "12_x", "١٢"):
        with pytest.raises(ValueError, match="is not the id of a job"):
            parse_key(text)
    assert JobKey(12).includes(JobKey(12, 3))
    assert not JobKey(12, 4).includes(JobKey(12, 3))
