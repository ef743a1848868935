"""What an executor decides: tasks, workers, leases and time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.executor import actions as do
from gpu_worker_pool.executor import facts
from gpu_worker_pool.executor.actions import EndingWay, FailureCause
from gpu_worker_pool.executor.crew import ASK_AGAIN_S, MOST_FAILED_STARTS, Crew, CrewRules

from .crew_simulation import CrewSimulation

RULES = st.builds(
    CrewRules,
    max_workers=st.integers(1, 4),
    retries=st.integers(0, 2),
    idle_release_s=st.sampled_from([0.0, 10.0]),
    max_tasks=st.sampled_from([None, 1, 2]),
)
CHOICES = st.lists(st.integers(0, 1000), max_size=120)
ENDS: st.SearchStrategy[facts.ShutDown | facts.CrewInterrupted] = st.sampled_from(
    [facts.ShutDown(), facts.ShutDown(cancels_tasks=True), facts.CrewInterrupted()]
)


@given(RULES, CHOICES, ENDS, CHOICES)
def test_whatever_happens_every_task_is_settled_once_and_no_lease_is_left(
    rules: CrewRules,
    before: list[int],
    end: facts.ShutDown | facts.CrewInterrupted,
    after: list[int],
) -> None:
    simulation = CrewSimulation(rules)
    simulation.play(before)
    simulation.close(end)
    simulation.play(after if not simulation.is_stopped else [])
    simulation.finish()

    assert len(simulation.outcome) == simulation.submitted


@given(RULES, CHOICES)
def test_a_crew_without_work_gives_all_leases_back(rules: CrewRules, choices: list[int]) -> None:
    simulation = CrewSimulation(rules)
    simulation.play(choices)
    for _ in range(1000):
        if not simulation.workers and len(simulation.outcome) == simulation.submitted:
            break
        happening = [items[0] for items in (simulation.of_worker(*item) for item in simulation.workers.items())]
        useful = [one for one in happening if one[0] in {"answered", "ended", "granted", "ready", "released"}]
        (useful[0][1] if useful else lambda: simulation._pass_time(30.0))()

    assert simulation.workers == {}
    assert len(simulation.outcome) == simulation.submitted


def told(crew: Crew, *happened: facts.Fact, now: float = 0.0) -> list[do.CrewAction]:
    """What the crew wants after the last of these."""
    out: list[do.CrewAction] = []
    for fact in happened:
        out = crew.handle(fact, now)
    return out


def working(rules: CrewRules, tasks: Iterable[int] = (0,)) -> Crew:
    """A crew whose first worker works on the first of these tasks."""
    crew = Crew(rules)
    told(crew, *map(facts.TaskSubmitted, tasks), facts.WorkerLeased(1), facts.WorkerReady(1))
    return crew


def test_a_lease_is_requested_when_there_is_a_task_and_not_before() -> None:
    crew = Crew(CrewRules(max_workers=2))

    assert told(crew, facts.TimePassed()) == []
    assert told(crew, facts.TaskSubmitted(0)) == [do.LeaseWorker(1)]
    assert told(crew, facts.TaskSubmitted(1)) == [do.LeaseWorker(2)]
    assert told(crew, facts.TaskSubmitted(2)) == []  # as many as are allowed


def test_a_process_starts_on_its_lease_and_gets_the_first_task_when_it_is_ready() -> None:
    crew = Crew(CrewRules(max_workers=1))
    told(crew, facts.TaskSubmitted(7), facts.TaskSubmitted(8))

    assert told(crew, facts.WorkerLeased(1)) == [do.StartWorker(1)]
    assert told(crew, facts.WorkerReady(1)) == [do.SendTask(1, 7)]
    assert told(crew, facts.TaskSettled(1, 7)) == [do.SendTask(1, 8)]


def test_an_idle_worker_keeps_its_lease_for_a_while() -> None:
    crew = working(CrewRules(max_workers=1, idle_release_s=10.0))

    assert told(crew, facts.TaskSettled(1, 0), now=5.0) == []
    assert crew.next_deadline == 15.0
    assert told(crew, facts.TimePassed(), now=14.9) == []
    assert told(crew, facts.TimePassed(), now=15.0) == [do.EndWorker(1, EndingWay.QUIETLY)]
    assert told(crew, facts.WorkerGone(1)) == [do.ReleaseWorker(1)]


def test_the_worker_that_worked_last_is_used_again_so_that_others_become_free() -> None:
    crew = Crew(CrewRules(max_workers=2))
    told(crew, facts.TaskSubmitted(0), facts.TaskSubmitted(1))
    told(crew, *(fact(worker) for worker in (1, 2) for fact in (facts.WorkerLeased, facts.WorkerReady)))
    told(crew, facts.TaskSettled(1, 0), now=1.0)
    told(crew, facts.TaskSettled(2, 1), now=2.0)

    assert told(crew, facts.TaskSubmitted(2), now=3.0) == [do.SendTask(2, 2)]


def test_a_request_is_withdrawn_when_its_task_is_cancelled_or_done_by_another() -> None:
    crew = working(CrewRules(max_workers=2), (0, 1))
    assert told(crew, facts.TaskCancelled(1)) == [do.EndWorker(2, EndingWay.QUIETLY)]

    crew = working(CrewRules(max_workers=2), (0, 1))
    assert told(crew, facts.TaskSettled(1, 0)) == [do.SendTask(1, 1), do.EndWorker(2, EndingWay.QUIETLY)]


def test_a_lease_that_comes_after_its_request_was_withdrawn_starts_nothing() -> None:
    crew = Crew(CrewRules(max_workers=1))
    told(crew, facts.TaskSubmitted(0), facts.TaskCancelled(0))

    assert told(crew, facts.WorkerLeased(1)) == []


def test_the_task_of_a_dead_worker_fails() -> None:
    crew = working(CrewRules(max_workers=1))

    assert told(crew, facts.WorkerGone(1)) == [
        do.FailTask(0, 1, FailureCause.WORKER_DIED, attempts=1),
        do.ReleaseWorker(1),
    ]


def test_with_retries_it_is_repeated_before_all_others_and_fails_when_they_are_used_up() -> None:
    crew = working(CrewRules(max_workers=1, retries=1), (0, 1))
    again = do.RepeatTask(0, 1, FailureCause.WORKER_DIED, attempts=1)
    assert told(crew, facts.WorkerGone(1)) == [again, do.ReleaseWorker(1)]
    assert told(crew, facts.WorkerReleased(1)) == [do.LeaseWorker(2)]
    assert told(crew, facts.WorkerLeased(2), facts.WorkerReady(2)) == [do.SendTask(2, 0)]

    assert do.FailTask(0, 2, FailureCause.WORKER_DIED, attempts=2) in told(crew, facts.WorkerGone(2))
    assert told(crew, facts.WorkerReleased(2), facts.WorkerLeased(3), facts.WorkerReady(3)) == [do.SendTask(3, 1)]


def test_a_task_is_not_repeated_while_its_first_process_may_still_run() -> None:
    crew = working(CrewRules(max_workers=2, retries=1))

    assert told(crew, facts.WorkerLeaseLost(1)) == [do.EndWorker(1, EndingWay.TERMINATE)]
    assert told(crew, facts.WorkerGone(1)) == [
        do.RepeatTask(0, 1, FailureCause.LEASE_LOST, attempts=1),
        do.ReleaseWorker(1),
        do.LeaseWorker(2),
    ]


def test_a_task_that_did_not_reach_its_worker_goes_to_another_one_without_a_retry() -> None:
    crew = working(CrewRules(max_workers=2))

    assert told(crew, facts.TaskUndelivered(1, 0)) == [do.EndWorker(1, EndingWay.QUIETLY), do.LeaseWorker(2)]
    assert told(crew, facts.WorkerLeased(2), facts.WorkerReady(2)) == [do.SendTask(2, 0)]


def test_a_worker_that_hung_up_gets_no_task() -> None:
    crew = working(CrewRules(max_workers=1))
    told(crew, facts.TaskSettled(1, 0))

    assert told(crew, facts.WorkerHungUp(1)) == [do.EndWorker(1, EndingWay.QUIETLY)]
    assert told(crew, facts.TaskSubmitted(1)) == []


def test_a_result_that_arrives_after_the_loss_counts() -> None:
    crew = working(CrewRules(max_workers=1, retries=1))
    told(crew, facts.WorkerLeaseLost(1), facts.TaskSettled(1, 0))

    assert told(crew, facts.WorkerGone(1)) == [do.ReleaseWorker(1)]


def test_the_task_of_a_lost_lease_fails_for_that_reason() -> None:
    crew = working(CrewRules(max_workers=1))
    told(crew, facts.WorkerLeaseLost(1))

    assert do.FailTask(0, 1, FailureCause.LEASE_LOST, attempts=1) in told(crew, facts.WorkerGone(1))


def test_a_worker_that_is_warned_finishes_its_task_and_gets_no_other() -> None:
    crew = working(CrewRules(max_workers=1), (0, 1))

    assert told(crew, facts.WorkerWarned(1, is_warned=True)) == []
    assert told(crew, facts.TaskSettled(1, 0)) == [do.EndWorker(1, EndingWay.QUIETLY)]


def test_a_warning_that_is_withdrawn_is_forgotten() -> None:
    crew = working(CrewRules(max_workers=1), (0, 1))
    told(crew, facts.WorkerWarned(1, is_warned=True), facts.WorkerWarned(1, is_warned=False))

    assert told(crew, facts.TaskSettled(1, 0)) == [do.SendTask(1, 1)]


def test_a_refusal_fails_all_tasks_where_no_worker_could_do_them() -> None:
    crew = Crew(CrewRules(max_workers=1))
    told(crew, facts.TaskSubmitted(0), facts.TaskSubmitted(1))

    assert told(crew, facts.WorkerRefused(1)) == [
        do.EndWorker(1, EndingWay.QUIETLY),
        *(do.FailTask(task, 1, FailureCause.NO_LEASE, attempts=0) for task in (0, 1)),
    ]
    # The next one tries again.
    assert told(crew, facts.WorkerGone(1), facts.WorkerReleased(1), facts.TaskSubmitted(2)) == [do.LeaseWorker(2)]


def test_where_another_worker_goes_on_a_refusal_fails_no_task_and_more_is_requested_later() -> None:
    crew = working(CrewRules(max_workers=2), (0, 1))

    assert told(crew, facts.WorkerRefused(2)) == [do.EndWorker(2, EndingWay.QUIETLY)]
    assert told(crew, facts.WorkerGone(2), facts.WorkerReleased(2), now=1.0) == []
    assert crew.next_deadline == ASK_AGAIN_S
    assert told(crew, facts.TimePassed(), now=ASK_AGAIN_S) == [do.LeaseWorker(3)]


def test_a_failed_initializer_breaks_the_crew() -> None:
    crew = Crew(CrewRules(max_workers=1))
    told(crew, facts.TaskSubmitted(0), facts.WorkerLeased(1))

    assert told(crew, facts.WorkerUnfit(1)) == [
        do.BreakCrew(1, FailureCause.WORKER_UNFIT),
        do.FailTask(0, 1, FailureCause.WORKER_UNFIT, attempts=0),
        do.EndWorker(1, EndingWay.QUIETLY),
    ]
    assert told(crew, facts.TaskSubmitted(1)) == [do.FailTask(1, 1, FailureCause.WORKER_UNFIT, attempts=0)]


def test_workers_that_keep_dying_before_they_are_ready_break_the_crew() -> None:
    crew = Crew(CrewRules(max_workers=1))
    told(crew, facts.TaskSubmitted(0))
    out: list[do.CrewAction] = []
    for worker in range(1, MOST_FAILED_STARTS + 1):
        assert not any(isinstance(action, do.BreakCrew) for action in out)
        out = told(crew, facts.WorkerLeased(worker), facts.WorkerGone(worker))
        assert told(crew, facts.WorkerReleased(worker)) == []  # not at once
        told(crew, facts.TimePassed(), now=crew.next_deadline or 0.0)

    assert do.BreakCrew(MOST_FAILED_STARTS, FailureCause.STARTS_FAILED) in out


# What ends a worker before it is ready, and what its tasks then fail for.
EARLY_ENDS: dict[str, tuple[list[str], str]] = {
    "the guard tells it first": (["died"], "STARTS_FAILED"),
    "its line closes first": (["hung up", "ended"], "STARTS_FAILED"),
    "its lease is lost": (["lost", "ended"], "LEASES_TOO_SHORT"),
    "its lease ends soon": (["warned", "ended"], "LEASES_TOO_SHORT"),
    "it is ready too late": (["warned", "ready", "ended"], "LEASES_TOO_SHORT"),
}


@given(RULES, st.integers(1, 6), st.sampled_from(sorted(EARLY_ENDS)))
def test_workers_that_always_end_before_they_are_ready_fail_all_tasks_in_bounded_starts(
    rules: CrewRules, tasks: int, name: str
) -> None:
    simulation = CrewSimulation(rules)
    for _ in range(tasks):
        simulation._submit()
    early, cause = EARLY_ENDS[name]
    for _ in range(2 * MOST_FAILED_STARTS):
        for number in list(simulation.workers):
            for event in ["granted", *early, "released"]:
                possible = (
                    simulation.of_worker(number, simulation.workers[number]) if number in simulation.workers else []
                )
                dict(possible).get(event, lambda: None)()
        simulation._pass_time(60.0)

    assert simulation.outcome == dict.fromkeys(range(tasks), cause)
    assert simulation.workers == {}
    assert simulation.is_broken == (cause == "STARTS_FAILED")


def test_after_leases_that_were_too_short_the_next_task_tries_again() -> None:
    crew = Crew(CrewRules(max_workers=1))
    told(crew, facts.TaskSubmitted(0))
    for worker in range(1, MOST_FAILED_STARTS + 1):
        told(crew, facts.WorkerLeased(worker), facts.WorkerWarned(worker, is_warned=True), facts.WorkerGone(worker))
        told(crew, facts.WorkerReleased(worker))
        told(crew, facts.TimePassed(), now=crew.next_deadline or 0.0)

    assert told(crew, facts.TaskSubmitted(1), now=60.0) == [do.LeaseWorker(MOST_FAILED_STARTS + 1)]


def test_while_another_worker_works_they_do_not() -> None:
    crew = working(CrewRules(max_workers=2), (0, 1))
    now, pauses = 0.0, []
    for worker in range(2, 20):
        out = told(crew, facts.WorkerLeased(worker), facts.WorkerGone(worker), now=now)
        assert not any(isinstance(action, do.BreakCrew) for action in out)
        told(crew, facts.WorkerReleased(worker), now=now)
        pauses.append((crew.next_deadline or 0.0) - now)
        now += pauses[-1]
        assert told(crew, facts.TimePassed(), now=now) == [do.LeaseWorker(worker + 1)]

    assert pauses[0] == pytest.approx(0.1)
    assert pauses[-1] == pytest.approx(25.6)


def test_an_interrupt_cancels_what_waits_and_ends_what_runs_and_a_second_one_at_once() -> None:
    crew = working(CrewRules(max_workers=1, retries=5), (0, 1))

    assert told(crew, facts.CrewInterrupted()) == [do.CancelTask(1), do.EndWorker(1, EndingWay.INTERRUPT)]
    assert told(crew, facts.CrewInterrupted()) == [do.EndWorker(1, EndingWay.AT_ONCE)]
    assert told(crew, facts.CrewInterrupted()) == []
    assert do.FailTask(0, 1, FailureCause.INTERRUPTED, attempts=1) in told(crew, facts.WorkerGone(1))
    assert told(crew, facts.WorkerReleased(1)) == [do.StopCrew()]


@pytest.mark.parametrize("max_tasks", [1, 2])
def test_a_worker_is_replaced_after_so_many_tasks(max_tasks: int) -> None:
    crew = working(CrewRules(max_workers=1, max_tasks=max_tasks), range(3))
    for task in range(max_tasks - 1):
        told(crew, facts.TaskSettled(1, task))

    assert told(crew, facts.TaskSettled(1, max_tasks - 1)) == [do.EndWorker(1, EndingWay.QUIETLY)]


def test_a_shut_down_ends_idle_workers_at_once() -> None:
    crew = working(CrewRules(max_workers=1, idle_release_s=1000.0))
    told(crew, facts.TaskSettled(1, 0))

    assert told(crew, facts.ShutDown()) == [do.EndWorker(1, EndingWay.QUIETLY)]
