"""Which jobs are next: dependencies, arrays, order."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.jobs.job_key import ArrayTasks, JobKey, parse_array
from gpu_worker_pool.jobs.life import AfterFailure, CancelAsked, JobEvent, JobState, Submission
from gpu_worker_pool.jobs.plan import JobPlan, make_plan

from .lives import OPENED, became, in_state, started, submission

BAD = [JobState.FAILED, JobState.CANCELLED, JobState.INTERRUPTED, JobState.SKIPPED]


def plan(
    *found: Submission,
    requests: Mapping[int, int] | None = None,
    starting: Mapping[int, int] | None = None,
    most_waiting: int = 256,
) -> JobPlan:
    return make_plan({one.terms.number: one for one in found}, requests or {}, starting or {}, most_waiting)


def test_jobs_are_requested_in_the_order_of_their_submission_higher_priority_first() -> None:
    found = plan(submission(3), submission(1), submission(2, tasks=2), submission(4, priority=5))
    assert found.request == (4, 1, 2, 3)


def test_a_job_waits_for_all_those_it_comes_after() -> None:
    second = submission(5, after=(JobKey(3), JobKey(4, 1)))
    other: list[JobEvent] = [OPENED, started(1), became(JobState.ENDED, 1)]
    four = submission(4, *other, started(0), became(JobState.FAILED, 0), tasks=2)
    assert plan(second, submission(3, *other, tasks=2), four).request == (3,)
    three = submission(3, *other, started(0), became(JobState.ENDED, 0), tasks=2)
    assert plan(second, three, four).request == (5,)


@pytest.mark.parametrize("bad", BAD)
def test_what_happens_after_a_failure_is_what_was_chosen(bad: JobState) -> None:
    first, other, done = in_state(1, bad), in_state(2, JobState.RUNNING), in_state(2, JobState.ENDED)
    after = (JobKey(1), JobKey(2))
    skipped = plan(first, other, submission(3, after=after)).skip
    assert re.fullmatch(f"job 1 (was )?{bad}", skipped[3])
    runs = submission(3, after=after, after_failure=AfterFailure.RUN)
    assert plan(first, other, runs) == JobPlan({})
    assert plan(first, done, runs).request == (3,)
    assert plan(first, done, submission(3, after=after, after_failure=AfterFailure.WAIT)) == JobPlan({})


def test_a_job_after_one_that_is_no_longer_known_is_skipped() -> None:
    assert plan(submission(3, after=(JobKey(1),))).skip == {3: "job 1 is no longer known"}
    assert plan(submission(1), submission(3, after=(JobKey(1, 4),))).skip == {3: "job 1_4 is no longer known"}


def test_an_array_has_one_request_at_a_time_until_each_task_has_a_supervisor() -> None:
    array = submission(2, OPENED, started(0), tasks=3)
    assert plan(array).request == (2,)
    assert plan(array, requests={2: 1}) == JobPlan({})
    assert plan(array, starting={2: 1}).request == (2,)
    assert plan(array, starting={2: 2}) == JobPlan({})
    assert plan(submission(2, OPENED, started(0), tasks=3, at_once=1)) == JobPlan({})
    assert plan(submission(2, OPENED, started(0), tasks=3, at_once=2)).request == (2,)


def test_a_request_that_is_not_needed_is_withdrawn() -> None:
    taken = submission(2, OPENED, started(0), tasks=1)
    assert plan(taken, requests={2: 1}) == JobPlan({}, withdraw=(2,))
    cancelled = submission(2, CancelAsked(at=1.0))
    assert plan(cancelled, submission(3), requests={2: 1}, most_waiting=1) == JobPlan({}, withdraw=(2,), request=(3,))


def test_no_more_requests_wait_than_may() -> None:
    found = plan(submission(1), submission(2), submission(3), submission(4), requests={1: 1}, most_waiting=2)
    assert found.request == (2,)


def test_a_job_that_is_run_again_is_behind_those_submitted_before_that() -> None:
    again = submission(1, OPENED, started(), became(JobState.SUBMITTED, behind=3))
    assert plan(again, submission(3), submission(4)).request == (3, 1, 4)


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
    found = {
        n: in_state(
            n, state, priority=priority, after=(JobKey(n - 1),) if depends and n > 1 else (), after_failure=mode
        )
        for n, (state, priority, depends, mode) in enumerate(facts, start=1)
    }
    made = make_plan(found, {}, {}, most_waiting)
    chosen = [found[number] for number in made.request]
    assert chosen == sorted(chosen, key=lambda one: one.order)
    assert len(chosen) <= most_waiting
    for one in chosen:
        for before in one.terms.after:
            state = found[before.number].life(None).state
            assert state is JobState.ENDED or (state.is_over and one.terms.after_failure is AfterFailure.RUN)
    for number in made.skip:
        assert found[found[number].terms.after[0].number].life(None).state in BAD


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
