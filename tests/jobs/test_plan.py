"""Which jobs are next: dependencies, arrays, order."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.jobs.job_key import ArrayTasks, JobKey, parse_array
from gpu_worker_pool.jobs.life import AfterFailure, JobLife, JobState
from gpu_worker_pool.jobs.plan import JobPlan, make_plan

from .lives import failed, job

BAD = [JobState.FAILED, JobState.CANCELLED, JobState.INTERRUPTED, JobState.SKIPPED]


def plan(*lives: JobLife, most_waiting: int = 256) -> JobPlan:
    return make_plan({life.key: life for life in lives}, most_waiting)


def requested(*lives: JobLife, most_waiting: int = 256) -> list[str]:
    return [str(key) for key in plan(*lives, most_waiting=most_waiting).request]


def test_jobs_are_requested_in_the_order_of_their_submission_higher_priority_first() -> None:
    assert requested(job(3), job(1), job(2, 1), job(2, 0), job(4, priority=5)) == ["4", "1", "2_0", "2_1", "3"]


def test_a_job_waits_for_all_those_it_comes_after() -> None:
    second = job(5, after=(JobKey(3), JobKey(4, 1)))
    before = [job(3, 0, JobState.ENDED), job(3, 1, JobState.RUNNING), job(4, 1, JobState.ENDED)]
    assert requested(second, *before, job(4, 0, JobState.RUNNING)) == []
    assert requested(second, before[0], job(3, 1, JobState.ENDED), before[2], job(4, 0, JobState.FAILED)) == ["5"]


@pytest.mark.parametrize("bad", BAD)
def test_what_happens_after_a_failure_is_what_was_chosen(bad: JobState) -> None:
    first, other = job(1, state=bad), job(2, state=JobState.RUNNING)
    after = (JobKey(1), JobKey(2))
    (skipped,) = plan(first, other, job(3, after=after)).skip
    assert skipped.key == JobKey(3)
    assert re.fullmatch(f"job 1 (was )?{bad}", skipped.why)
    assert plan(first, other, job(3, after=after, after_failure=AfterFailure.RUN)) == JobPlan()
    done = job(2, state=JobState.ENDED)
    assert requested(first, done, job(3, after=after, after_failure=AfterFailure.RUN)) == ["3"]
    assert plan(first, done, job(3, after=after, after_failure=AfterFailure.WAIT)) == JobPlan()


def test_a_job_after_one_that_is_no_longer_known_is_skipped() -> None:
    assert plan(job(3, after=(JobKey(1),))).skip[0].why == "job 1 is no longer known"


def test_an_array_has_no_more_tasks_at_once_than_it_said() -> None:
    tasks = [job(2, index, JobState.RUNNING if index == 0 else JobState.SUBMITTED, at_once=2) for index in range(5)]
    assert requested(*tasks, job(3)) == ["2_1", "3"]


def test_no_more_requests_wait_than_may() -> None:
    assert requested(job(1, state=JobState.WAITING), job(2), job(3), job(4), most_waiting=2) == ["2"]


def test_a_job_that_is_run_again_is_behind_those_submitted_before_that() -> None:
    from dataclasses import replace  # noqa: PLC0415 - for this test

    again = replace(failed(1), state=JobState.SUBMITTED, behind=3)
    assert requested(again, job(3), job(4)) == ["3", "1", "4"]


@given(
    st.lists(
        st.tuples(st.sampled_from(list(JobState)), st.integers(-1, 1), st.booleans(), st.sampled_from(AfterFailure)),
        max_size=12,
    ),
    st.integers(1, 6),
)
def test_a_plan_keeps_order_room_and_dependencies(
    facts: list[tuple[JobState, int, bool, AfterFailure]], most_waiting: int
) -> None:
    lives = [
        job(n, state=state, priority=priority, after=(JobKey(n - 1),) if depends and n > 1 else (), after_failure=mode)
        for n, (state, priority, depends, mode) in enumerate(facts, start=1)
    ]
    by_key = {life.key: life for life in lives}
    found = make_plan(by_key, most_waiting)
    chosen = [by_key[key] for key in found.request]
    assert chosen == sorted(chosen, key=lambda life: life.order)
    assert {life.state for life in chosen} <= {JobState.SUBMITTED}
    waiting = sum(life.state is JobState.WAITING for life in lives)
    assert len(chosen) + waiting <= max(most_waiting, waiting)
    for life in chosen:
        for before in life.terms.after:
            state = by_key[before].state
            assert state is JobState.ENDED or (state.is_over and life.terms.after_failure is AfterFailure.RUN)
    for skipped in found.skip:
        assert by_key[by_key[skipped.key].terms.after[0]].state in BAD


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("0-3", ArrayTasks((0, 1, 2, 3))),
        ("5", ArrayTasks((5,))),
        ("1,5,7-9", ArrayTasks((1, 5, 7, 8, 9))),
        ("0-20:10", ArrayTasks((0, 10, 20))),
        (" 0-2 % 2".replace(" % ", "%"), ArrayTasks((0, 1, 2), 2)),
        ("3,3,1", ArrayTasks((3, 1))),
    ],
)
def test_an_array_is_read(text: str, tasks: ArrayTasks) -> None:
    assert parse_array(text) == tasks


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "0-9:0", "0-9%", "0-9%0", "1,,2", "-3", "0-99999", "1-", "0-9%x", "٣"]
)
def test_an_array_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an array|too many tasks"):
        parse_array(text)
