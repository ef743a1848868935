"""The life of a submission, event by event and by random histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.jobs.job_key import JobKey, parse_key
from gpu_worker_pool.jobs.journal import decode, encode
from gpu_worker_pool.jobs.life import (
    MAX_PREEMPTIONS,
    CancelAsked,
    ImpossibleEvent,
    JobEvent,
    JobState,
    JobTerms,
    Requested,
    RunClosed,
    RunOpened,
    Submission,
    TaskEnded,
    TasksClosed,
    TasksRetried,
    TaskStarted,
    abandoned,
    ended,
    interrupted,
    replay,
    to_retry,
)

from .lives import OPENED, RUN, became, started, submission

RUNS = ("a", "b", "c")
ACTIONS = st.tuples(
    st.sampled_from(
        ["request", "open", "take", "good", "bad", "preempted", "limit", "die", "cancel", "close", "retry"]
    ),
    st.sampled_from(RUNS),
    st.integers(0, 3),
)


def decided(now: Submission, action: str, run: str, index: int) -> Sequence[JobEvent]:
    """What a keeper, a supervisor or a command would write down if this happened."""
    running = now.running(run)
    match action:
        case "request":
            return [Requested(at=1.0, worker=run)] if now.waiting else []
        case "open":
            return [] if run in now.open_runs else [RunOpened(at=2.0, run=replace(RUN, id=run))]
        case "take":
            life = now.next_task()
            is_free = run in now.open_runs and not running and life is not None
            return [TaskStarted(at=3.0, index=life.key.index, run=run)] if is_free and life is not None else []
        case "good" | "bad" | "preempted" | "limit":
            code = {"good": 0, "bad": 1}.get(action, 0)
            reason = {"preempted": "preempted", "limit": "time_limit"}.get(action)
            return [ended(now, life, 4.0, code, end_reason=reason, last_number=9) for life in running]
        case "die":
            return abandoned(now, now.open_runs[run], 5.0, is_same_boot=True) if run in now.open_runs else []
        case "cancel":
            return [CancelAsked(at=6.0, indices=(index,))]
        case "close":
            return [TasksClosed(at=7.0, becomes=JobState.SKIPPED, why="it is skipped")]
        case _:
            again = to_retry(now, [index], has_all=False)
            return [TasksRetried(at=8.0, behind=9, indices=tuple(again))] if again else []


@given(st.lists(ACTIONS, max_size=60), st.integers(0, 2), st.booleans())
def test_a_random_history_keeps_what_is_promised_and_can_be_replayed_from_its_lines(
    actions: list[tuple[str, str, int]], retries: int, stops: bool
) -> None:
    terms = JobTerms(7, (0, 1, 2, 3), retries=retries, stops_on_failure=stops)
    now, written = Submission(terms), list[JobEvent]()
    starts: Counter[int | None] = Counter()
    allowed: Counter[int | None] = Counter(dict.fromkeys(terms.indices, 1))
    for action, run, index in actions:
        for event in decided(now, action, run, index):
            if isinstance(event, TaskStarted):
                assert not now.is_stopped
                starts[event.index] += 1
                # A task runs once, and again only if it was preempted, may be tried again, or its user said so.
                assert starts[event.index] <= allowed[event.index]
            now.evolve(event)
            written.append(event)
            if isinstance(event, TaskEnded) and event.becomes is JobState.SUBMITTED:
                allowed[event.index] += 1
            for again in event.indices if isinstance(event, TasksRetried) else ():
                allowed[again] += 1
        lives = list(now.lives())
        counted = Counter(JobState.SUBMITTED if life.state is JobState.WAITING else life.state for life in lives)
        assert {state: count for state, count in now.counts.items() if count} == counted
        assert now.is_over == all(life.state.is_over for life in lives)
        first = now.next_task()
        assert (first is None) == (now.waiting == 0)
        if first is not None:
            places = {life.key: place for place, life in enumerate(lives)}
            ready = [life for life in lives if not life.state.is_over and life.state is not JobState.RUNNING]
            assert first.key == min(ready, key=lambda life: (life.behind or 0, places[life.key])).key
        assert len({life.run for life in now.running()}) == len(now.running())  # a supervisor runs one at a time
    replayed = replay(terms, (decode(encode(event).rstrip(b"\n")) for event in written))
    assert list(replayed.lives()) == list(now.lives())
    assert (replayed.open_runs, replayed.requested_at) == (now.open_runs, now.requested_at)
    assert replayed.next_task() == now.next_task()


@pytest.mark.parametrize(
    ("code", "reason", "becomes"),
    [
        (0, None, JobState.ENDED),
        (3, None, JobState.FAILED),
        (None, None, JobState.FAILED),
        (0, "time_limit", JobState.FAILED),  # a checkpoint at the limit is not success
        (None, "time_limit", JobState.FAILED),
        (0, "preempted", JobState.SUBMITTED),  # whatever its exit code
        (7, "preempted", JobState.SUBMITTED),
        (None, "idle", JobState.FAILED),
    ],
)
def test_what_becomes_of_a_task(code: int | None, reason: str | None, becomes: JobState) -> None:
    now = submission(1, OPENED, started())
    event = ended(now, now.life(None), 3.0, code, end_reason=reason, last_number=4)
    assert (event.becomes, event.behind) == (becomes, None)


def test_one_that_fails_is_run_again_behind_what_was_submitted_until_then() -> None:
    now = submission(1, OPENED, started(), retries=1)
    event = ended(now, now.life(None), 3.0, 1, last_number=4)
    assert (event.becomes, event.behind) == (JobState.SUBMITTED, 4)
    now.evolve(event)
    assert now.order == (0, 4, True, 1)
    now.evolve(started())
    assert ended(now, now.life(None), 4.0, 1, last_number=9).becomes is JobState.FAILED


def test_a_preempted_task_keeps_its_place_and_costs_no_retry_but_not_for_ever() -> None:
    now = submission(1, OPENED, started(), retries=0)
    for _ in range(MAX_PREEMPTIONS):
        now.evolve(ended(now, now.life(None), 3.0, 0, end_reason="preempted", last_number=9))
        assert (now.life(None).state, now.life(None).tries, now.order) == (JobState.SUBMITTED, 0, (0, 1, False, 1))
        now.evolve(started())
    last = ended(now, now.life(None), 3.0, 0, end_reason="preempted", last_number=9)
    assert (last.becomes, last.why) == (JobState.FAILED, f"preempted {MAX_PREEMPTIONS + 1} times")
    assert now.life(None).attempts == MAX_PREEMPTIONS + 1


def test_a_task_that_was_told_to_end_is_cancelled_whatever_its_exit_code() -> None:
    now = submission(1, OPENED, started(), CancelAsked(at=3.0))
    assert ended(now, now.life(None), 4.0, 143, last_number=1).becomes is JobState.CANCELLED
    assert ended(now, now.life(None), 4.0, 0, last_number=1).becomes is JobState.CANCELLED
    assert interrupted(now.life(None), 4.0, "killed").becomes is JobState.CANCELLED


def test_a_supervisor_that_is_gone_leaves_its_task_interrupted_and_the_others_to_others() -> None:
    now = submission(1, OPENED, started(0), tasks=3)
    events = abandoned(now, RUN, 4.0, is_same_boot=False)
    for event in events:
        now.evolve(event)
    assert [life.state for life in now.lives()] == [JobState.INTERRUPTED, JobState.SUBMITTED, JobState.SUBMITTED]
    assert now.life(0).why == "the machine was restarted while it ran"
    assert now.open_runs == {}


def test_no_task_is_started_after_a_failure_where_that_was_said() -> None:
    now = submission(1, OPENED, started(0), became(JobState.FAILED, 0), tasks=3, stops_on_failure=True)
    assert (now.next_task(), now.waiting, now.is_over) == (None, 0, False)


def test_what_ended_well_is_not_run_again_unless_that_is_asked_for() -> None:
    events = [OPENED, *(event for index in (0, 1) for event in (started(index), became(JobState.ENDED, index)))]
    now = submission(1, *events, started(2), became(JobState.FAILED, 2), started(3), tasks=5)
    assert to_retry(now, now.terms.indices, has_all=False) == [2]
    assert to_retry(now, now.terms.indices, has_all=True) == [0, 1, 2]


def test_what_waits_is_waiting_while_gpus_are_requested() -> None:
    now = submission(1, Requested(at=1.0, worker="w"), Requested(at=2.0, worker="x"), tasks=2)
    assert (now.life(0).state, now.requested_at, now.requested_by) == (JobState.WAITING, 1.0, "x")
    now.evolve(OPENED)
    assert now.life(0).state is JobState.SUBMITTED
    now.evolve(RunClosed(at=3.0, run=RUN.id))


@pytest.mark.parametrize("event", [started(5), started(1), became(JobState.ENDED, 0)])
def test_what_cannot_have_happened_is_refused(event: JobEvent) -> None:
    now = submission(1, OPENED, started(1), tasks=3)
    with pytest.raises(ImpossibleEvent):
        now.evolve(event)


def test_the_names_of_jobs() -> None:
    assert (parse_key("12"), parse_key(" 12_3 ")) == (JobKey(12), JobKey(12, 3))
    for text in ("", "0", "-1", "1_", "1_x", "1/2", "12 3"):
        with pytest.raises(ValueError, match="not the id of a job"):
            parse_key(text)
