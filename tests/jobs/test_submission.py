"""A submission, record by record and by random histories; and which submissions are next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.jobs.job_record import decode, encode
from gpu_worker_pool.jobs.job_spec import AfterFailure, ArrayTasks, JobSpec, parse_array
from gpu_worker_pool.jobs.submission import (
    MAX_RESTARTS,
    JobPlan,
    JobState,
    JobTask,
    Record,
    Run,
    Submission,
    Whole,
    abandoned,
    cancelled,
    closed,
    ended,
    make_plan,
    retried,
    started,
)

RUN = Run(id="run-1", pid=4711, started=5.0, guard_pid=4712, boot_id="boot", pid_namespace="ns", lease_id="lease")
BAD = [JobState.FAILED, JobState.CANCELLED, JobState.INTERRUPTED, JobState.SKIPPED]
NOW = 1000.0


def spec(tasks: int | None = None, **options: Any) -> JobSpec:
    array = None if tasks is None else tuple(range(tasks))
    return JobSpec(submitted_at=1.0, command=("true",), label="true", cwd="/", array=array, **options)


def submission(number: int = 1, *records: Record, tasks: int | None = None, **options: Any) -> Submission:
    """One job, or an array of this number of tasks, with these records."""
    made = Submission(number, spec(tasks, **options))
    for record in records:
        made.apply(record)
    return made


def running(index: int | None = None) -> JobTask:
    return started(JobTask(index), 2.0, RUN.id)


def became(state: JobState, index: int | None = None, **facts: Any) -> JobTask:
    return replace(running(index), state=state, ended_at=3.0, **facts)


def in_state(number: int, state: JobState, **options: Any) -> Submission:
    if state in {JobState.SUBMITTED, JobState.WAITING}:
        return submission(number, **options)
    return submission(number, RUN, running() if state is JobState.RUNNING else became(state), **options)


# --- lives -------------------------------------------------------------------------------------------------------------

ACTIONS = st.tuples(
    st.sampled_from(
        [
            "request",
            "open",
            "take",
            "good",
            "bad",
            "preempted",
            "limit",
            "die",
            "cancel",
            "close",
            "retry",
            "hold",
            "go",
        ]
    ),
    st.sampled_from(("a", "b", "c")),
    st.integers(0, 3),
)


def decided(now: Submission, action: str, run: str, index: int) -> Sequence[Record]:
    """What a keeper, a supervisor or a command would write down if this happened."""
    match action:
        case "request":
            return [replace(now.whole, requested_at=1.0, requested_by=run)] if now.waiting else []
        case "open":
            return [] if run in now.open_runs else [replace(RUN, id=run), replace(now.whole, requested_at=None)]
        case "take":
            task = now.next_task()
            is_free = run in now.open_runs and not now.running(run) and task is not None
            return [started(task, 3.0, run)] if is_free and task is not None else []
        case "good" | "bad" | "preempted" | "limit":
            code = {"good": 0, "bad": 1}.get(action, 0)
            reason = {"preempted": "preempted", "limit": "time_limit"}.get(action)
            return [ended(now, task, 4.0, code, end_reason=reason, last_number=9) for task in now.running(run)]
        case "die":
            return abandoned(now, now.open_runs[run], 5.0, is_same_boot=True) if run in now.open_runs else []
        case "cancel":
            return cancelled(now, 6.0, (index,))
        case "close":
            return closed(now, 7.0, JobState.SKIPPED, "it is skipped")
        case "hold" | "go":
            return [replace(now.whole, is_held=action == "hold")]
        case _:
            return retried(now, [index], 9, has_all=False)


@given(st.lists(ACTIONS, max_size=60), st.integers(0, 2), st.booleans(), st.booleans())
def test_a_random_history_keeps_what_is_promised_and_can_be_read_again_from_its_lines(
    actions: list[tuple[str, str, int]], retries: int, stops: bool, requeues: bool
) -> None:
    options = {"retries": retries, "stops_on_failure": stops, "is_requeued": requeues}
    now, lines = submission(7, tasks=4, **options), list[bytes]()
    starts: Counter[int | None] = Counter()
    allowed: Counter[int | None] = Counter(dict.fromkeys(range(4), 1))
    for action, run, index in actions:
        for record in decided(now, action, run, index):
            if isinstance(record, JobTask) and record.state is JobState.RUNNING and not record.is_cancel_asked:
                assert not now.is_stopped
                assert not now.whole.is_held
                starts[record.index] += 1
                # A task runs once, and again only if it is restarted, may be tried again, or its user said so.
                assert starts[record.index] <= allowed[record.index]
            elif isinstance(record, JobTask) and record.state is JobState.SUBMITTED:
                allowed[record.index] += 1
            now.apply(record)
            lines.append(encode(record))
        tasks = list(now.tasks())
        counted = Counter(JobState.SUBMITTED if task.state is JobState.WAITING else task.state for task in tasks)
        assert {state: count for state, count in now.counts.items() if count} == counted
        assert now.is_over == all(task.state.is_over for task in tasks)
        first = now.next_task()
        assert (first is None) == (now.waiting == 0)
        if first is not None:
            ready = [task for task in tasks if not task.state.is_over and task.state is not JobState.RUNNING]
            assert first.index == min(ready, key=lambda task: (task.behind, task.index or 0)).index
        assert len({task.run for task in now.running()}) == len(now.running())  # a supervisor runs one at a time
    again = submission(7, *(decode(line.rstrip(b"\n")) for line in lines), tasks=4, **options)
    assert list(again.tasks()) == list(now.tasks())
    assert (again.runs, again.whole, again.next_task()) == (now.runs, now.whole, now.next_task())


@pytest.mark.parametrize(
    ("code", "reason", "requeues", "becomes", "behind"),
    [
        (0, None, False, JobState.ENDED, 0),
        (3, None, False, JobState.FAILED, 0),
        (0, "time_limit", False, JobState.FAILED, 0),  # a checkpoint at the limit is not success
        (0, "time_limit", True, JobState.SUBMITTED, 4),
        (None, "time_limit", True, JobState.SUBMITTED, 4),
        (7, "preempted", False, JobState.SUBMITTED, 0),  # whatever its exit code
        (None, "idle", True, JobState.FAILED, 0),
        (1, "out_of_memory", True, JobState.FAILED, 0),
    ],
)
def test_what_becomes_of_a_task(
    code: int | None, reason: str | None, requeues: bool, becomes: JobState, behind: int
) -> None:
    now = submission(1, RUN, running(), is_requeued=requeues)
    task = ended(now, now.task(None), 3.0, code, end_reason=reason, last_number=4)
    assert (task.state, task.behind) == (becomes, behind)


def test_a_preempted_task_keeps_its_place_and_costs_no_retry_but_not_for_ever() -> None:
    now = submission(1, RUN, running())
    for _ in range(MAX_RESTARTS):
        now.apply(ended(now, now.task(None), 3.0, 0, end_reason="preempted", last_number=9))
        assert (now.task(None).state, now.task(None).tries, now.order[2]) == (JobState.SUBMITTED, 0, 1)
        now.apply(started(now.task(None), 4.0, RUN.id))
    last = ended(now, now.task(None), 3.0, 0, end_reason="preempted", last_number=9)
    assert (last.state, last.why) == (JobState.FAILED, f"preempted {MAX_RESTARTS + 1} times")


# --- which are next ------------------------------------------------------------------------------------------------------


def plan(
    *found: Submission,
    requests: Mapping[int, int] | None = None,
    starting: Mapping[int, int] | None = None,
    most_waiting: int = 256,
) -> JobPlan:
    return make_plan({one.number: one for one in found}, requests or {}, starting or {}, NOW, most_waiting)


def test_a_job_after_one_that_is_no_longer_known_is_skipped() -> None:
    assert plan(submission(3, after=("1",))).skip == {3: "job 1 is no longer known"}
    assert plan(submission(1), submission(3, after=("1_4",))).skip == {3: "job 1_4 is no longer known"}


def test_an_array_has_one_request_at_a_time_until_each_task_has_a_supervisor() -> None:
    array = submission(2, RUN, running(0), tasks=3)
    assert plan(array).request == (2,)
    assert plan(array, requests={2: 1}) == JobPlan({})
    assert plan(array, starting={2: 1}).request == (2,)
    assert plan(array, starting={2: 2}) == JobPlan({})
    assert plan(submission(2, RUN, running(0), tasks=3, at_once=1)) == JobPlan({})
    assert plan(submission(2, RUN, running(0), tasks=3, at_once=2)).request == (2,)


def test_what_is_not_needed_held_or_not_to_begin_yet_is_not_requested() -> None:
    assert plan(submission(2, RUN, running(0), tasks=1), requests={2: 1}) == JobPlan({}, withdraw=(2,))
    gone = submission(2, became(JobState.CANCELLED))
    assert plan(gone, submission(3), requests={2: 1}, most_waiting=1) == JobPlan({}, withdraw=(2,), request=(3,))
    assert plan(submission(2, Whole(is_held=True)), requests={2: 1}) == JobPlan({}, withdraw=(2,))
    assert plan(submission(2, begin_at=NOW + 1), submission(3, begin_at=NOW)) == JobPlan({}, request=(3,))


def test_the_order_is_by_what_was_put_first_then_priority_then_number_with_repeats_behind() -> None:
    again = submission(1, RUN, became(JobState.SUBMITTED, behind=3))
    first, prior = submission(6, Whole(first_at=5.0)), submission(5, priority=1)
    assert plan(again, submission(3), submission(4), prior, first).request == (6, 5, 3, 1, 4)


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
        n: in_state(n, state, priority=priority, after=(str(n - 1),) if depends and n > 1 else (), after_failure=mode)
        for n, (state, priority, depends, mode) in enumerate(facts, start=1)
    }
    made = make_plan(found, {}, {}, NOW, most_waiting)
    chosen = [found[number] for number in made.request]
    assert chosen == sorted(chosen, key=lambda one: one.order)
    assert len(chosen) <= most_waiting
    for one in chosen:
        for before in one.spec.after_keys:
            state = found[before.number].task(None).state
            assert state is JobState.ENDED or (state.is_over and one.spec.after_failure is AfterFailure.RUN)
    for number in made.skip:
        assert found[found[number].spec.after_keys[0].number].task(None).state in BAD


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("0-3", ArrayTasks((0, 1, 2, 3))),
        ("1,5,7-9", ArrayTasks((1, 5, 7, 8, 9))),
        ("0-20:10", ArrayTasks((0, 10, 20))),
        ("0-2%2", ArrayTasks((0, 1, 2), 2)),
        ("3,3,1", ArrayTasks((3, 1))),
    ],
)
def test_an_array_is_read(text: str, tasks: ArrayTasks) -> None:
    assert parse_array(text) == tasks


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-9:0", "0-9%0", "1,,2", "-3", "0-99999", "٣"])
def test_an_array_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an array|too many tasks"):
        parse_array(text)
