"""What an executor decides: tasks, workers, leases and time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.executor.crew import ASK_AGAIN_S, MOST_FAILED_STARTS, CrewRules, EndingWay, FailureCause

from .crew_simulation import CrewSimulation, RecordedCrew, Told, tell

RULES = st.builds(
    CrewRules,
    max_workers=st.integers(1, 4),
    retries=st.integers(0, 2),
    idle_release_s=st.sampled_from([0.0, 10.0]),
    max_tasks=st.sampled_from([None, 1, 2]),
)
CHOICES = st.lists(st.integers(0, 1000), max_size=120)
ENDS: st.SearchStrategy[Told] = st.sampled_from([("shut_down",), ("shut_down", True), ("interrupted",)])


@given(RULES, CHOICES, ENDS, CHOICES)
def test_whatever_happens_every_task_is_settled_once_and_no_lease_is_left(
    rules: CrewRules,
    before: list[int],
    end: Told,
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


def told(crew: RecordedCrew, *happened: Told, now: float = 0.0) -> list[Told]:
    """What the crew wants after the last of these."""
    for fact in happened:
        crew.wanted.clear()
        tell(crew, now, *fact)
    return list(crew.wanted)


def working(rules: CrewRules, tasks: Iterable[int] = (0,)) -> RecordedCrew:
    """A crew whose first worker works on the first of these tasks."""
    crew = RecordedCrew(rules)
    told(crew, *(("task_submitted", task) for task in tasks), ("worker_leased", 1), ("worker_ready", 1))
    return crew


def test_a_lease_is_requested_when_there_is_a_task_and_not_before() -> None:
    crew = RecordedCrew(CrewRules(max_workers=2))

    assert told(crew, ("time_passed",)) == []
    assert told(crew, ("task_submitted", 0)) == [("lease_worker", 1)]
    assert told(crew, ("task_submitted", 1)) == [("lease_worker", 2)]
    assert told(crew, ("task_submitted", 2)) == []  # as many as are allowed


def test_a_process_starts_on_its_lease_and_gets_the_first_task_when_it_is_ready() -> None:
    crew = RecordedCrew(CrewRules(max_workers=1))
    told(crew, ("task_submitted", 7), ("task_submitted", 8))

    assert told(crew, ("worker_leased", 1)) == [("start_worker", 1)]
    assert told(crew, ("worker_ready", 1)) == [("send_task", 1, 7)]
    assert told(crew, ("task_settled", 1, 7)) == [("send_task", 1, 8)]


class CountedQueue(OrderedDict[int, None]):
    """Counts the places that are passed on the way to the first key. One who goes over a dict passes, each time, the places
    of all that were taken from its beginning.
    """

    def __init__(self, keys: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(keys))
        self.places = len(self)
        self.passed = 0

    def __iter__(self) -> Iterator[int]:
        self.passed += self.places - len(self)
        return super().__iter__()

    def popitem(self, last: bool = True) -> tuple[int, None]:
        self.passed += len(self) if last else 1
        return super().popitem(last)


def test_the_next_of_many_tasks_is_found_in_one_step() -> None:
    crew = working(CrewRules(max_workers=1))
    queue = crew.waiting = CountedQueue(range(1, 1001))

    for task in range(1000):
        assert told(crew, ("task_settled", 1, task)) == [("send_task", 1, task + 1)]

    assert queue.passed <= 1000


def test_an_idle_worker_keeps_its_lease_for_a_while() -> None:
    crew = working(CrewRules(max_workers=1, idle_release_s=10.0))

    assert told(crew, ("task_settled", 1, 0), now=5.0) == []
    assert crew.next_deadline == 15.0
    assert told(crew, ("time_passed",), now=14.9) == []
    assert told(crew, ("time_passed",), now=15.0) == [("end_worker", 1, EndingWay.QUIETLY)]
    assert told(crew, ("worker_gone", 1)) == [("release_worker", 1)]


def test_the_worker_that_worked_last_is_used_again_so_that_others_become_free() -> None:
    crew = RecordedCrew(CrewRules(max_workers=2))
    told(crew, ("task_submitted", 0), ("task_submitted", 1))
    told(crew, *((fact, worker) for worker in (1, 2) for fact in ("worker_leased", "worker_ready")))
    told(crew, ("task_settled", 1, 0), now=1.0)
    told(crew, ("task_settled", 2, 1), now=2.0)

    assert told(crew, ("task_submitted", 2), now=3.0) == [("send_task", 2, 2)]


def test_a_request_is_withdrawn_when_its_task_is_cancelled_or_done_by_another() -> None:
    crew = working(CrewRules(max_workers=2), (0, 1))
    assert told(crew, ("task_cancelled", 1)) == [("end_worker", 2, EndingWay.QUIETLY)]

    crew = working(CrewRules(max_workers=2), (0, 1))
    assert told(crew, ("task_settled", 1, 0)) == [("send_task", 1, 1), ("end_worker", 2, EndingWay.QUIETLY)]


def test_a_lease_that_comes_after_its_request_was_withdrawn_starts_nothing() -> None:
    crew = RecordedCrew(CrewRules(max_workers=1))
    told(crew, ("task_submitted", 0), ("task_cancelled", 0))

    assert told(crew, ("worker_leased", 1)) == []


def test_the_task_of_a_dead_worker_fails() -> None:
    crew = working(CrewRules(max_workers=1))

    assert told(crew, ("worker_gone", 1)) == [
        ("fail_task", 0, 1, FailureCause.WORKER_DIED, 1),
        ("release_worker", 1),
    ]


def test_with_retries_it_is_repeated_before_all_others_and_fails_when_they_are_used_up() -> None:
    crew = working(CrewRules(max_workers=1, retries=1), (0, 1))
    again = ("repeat_task", 0, 1, FailureCause.WORKER_DIED, 1)
    assert told(crew, ("worker_gone", 1)) == [again, ("release_worker", 1)]
    assert told(crew, ("worker_released", 1)) == [("lease_worker", 2)]
    assert told(crew, ("worker_leased", 2), ("worker_ready", 2)) == [("send_task", 2, 0)]

    assert ("fail_task", 0, 2, FailureCause.WORKER_DIED, 2) in told(crew, ("worker_gone", 2))
    assert told(crew, ("worker_released", 2), ("worker_leased", 3), ("worker_ready", 3)) == [("send_task", 3, 1)]


def test_a_task_is_not_repeated_while_its_first_process_may_still_run() -> None:
    crew = working(CrewRules(max_workers=2, retries=1))

    assert told(crew, ("worker_lease_lost", 1)) == [("end_worker", 1, EndingWay.TERMINATE)]
    assert told(crew, ("worker_gone", 1)) == [
        ("repeat_task", 0, 1, FailureCause.LEASE_LOST, 1),
        ("release_worker", 1),
        ("lease_worker", 2),
    ]


def test_a_task_that_did_not_reach_its_worker_goes_to_another_one_without_a_retry() -> None:
    crew = working(CrewRules(max_workers=2))

    assert told(crew, ("task_undelivered", 1, 0)) == [("end_worker", 1, EndingWay.QUIETLY), ("lease_worker", 2)]
    assert told(crew, ("worker_leased", 2), ("worker_ready", 2)) == [("send_task", 2, 0)]


def test_a_worker_that_hung_up_gets_no_task() -> None:
    crew = working(CrewRules(max_workers=1))
    told(crew, ("task_settled", 1, 0))

    assert told(crew, ("worker_hung_up", 1)) == [("end_worker", 1, EndingWay.QUIETLY)]
    assert told(crew, ("task_submitted", 1)) == []


def test_a_result_that_arrives_after_the_loss_counts() -> None:
    crew = working(CrewRules(max_workers=1, retries=1))
    told(crew, ("worker_lease_lost", 1), ("task_settled", 1, 0))

    assert told(crew, ("worker_gone", 1)) == [("release_worker", 1)]


def test_the_task_of_a_lost_lease_fails_for_that_reason() -> None:
    crew = working(CrewRules(max_workers=1))
    told(crew, ("worker_lease_lost", 1))

    assert ("fail_task", 0, 1, FailureCause.LEASE_LOST, 1) in told(crew, ("worker_gone", 1))


def test_a_worker_that_is_warned_finishes_its_task_and_gets_no_other() -> None:
    crew = working(CrewRules(max_workers=1), (0, 1))

    assert told(crew, ("worker_warned", 1, True)) == []
    assert told(crew, ("task_settled", 1, 0)) == [("end_worker", 1, EndingWay.QUIETLY)]


def test_a_warning_that_is_withdrawn_is_forgotten() -> None:
    crew = working(CrewRules(max_workers=1), (0, 1))
    told(crew, ("worker_warned", 1, True), ("worker_warned", 1, False))

    assert told(crew, ("task_settled", 1, 0)) == [("send_task", 1, 1)]


def test_a_refusal_fails_all_tasks_where_no_worker_could_do_them() -> None:
    crew = RecordedCrew(CrewRules(max_workers=1))
    told(crew, ("task_submitted", 0), ("task_submitted", 1))

    assert told(crew, ("worker_refused", 1)) == [
        ("end_worker", 1, EndingWay.QUIETLY),
        *(("fail_task", task, 1, FailureCause.NO_LEASE, 0) for task in (0, 1)),
    ]
    # The next one tries again.
    assert told(crew, ("worker_gone", 1), ("worker_released", 1), ("task_submitted", 2)) == [("lease_worker", 2)]


def test_where_another_worker_goes_on_a_refusal_fails_no_task_and_more_is_requested_later() -> None:
    crew = working(CrewRules(max_workers=2), (0, 1))

    assert told(crew, ("worker_refused", 2)) == [("end_worker", 2, EndingWay.QUIETLY)]
    assert told(crew, ("worker_gone", 2), ("worker_released", 2), now=1.0) == []
    assert crew.next_deadline == ASK_AGAIN_S
    assert told(crew, ("time_passed",), now=ASK_AGAIN_S) == [("lease_worker", 3)]


def test_a_failed_initializer_breaks_the_crew() -> None:
    crew = RecordedCrew(CrewRules(max_workers=1))
    told(crew, ("task_submitted", 0), ("worker_leased", 1))

    assert told(crew, ("worker_unfit", 1)) == [
        ("break_crew", 1, FailureCause.WORKER_UNFIT),
        ("fail_task", 0, 1, FailureCause.WORKER_UNFIT, 0),
        ("end_worker", 1, EndingWay.QUIETLY),
    ]
    assert told(crew, ("task_submitted", 1)) == [("fail_task", 1, 1, FailureCause.WORKER_UNFIT, 0)]


def test_workers_that_keep_dying_before_they_are_ready_break_the_crew() -> None:
    crew = RecordedCrew(CrewRules(max_workers=1))
    told(crew, ("task_submitted", 0))
    out: list[Told] = []
    for worker in range(1, MOST_FAILED_STARTS + 1):
        assert not any(action[0] == "break_crew" for action in out)
        out = told(crew, ("worker_leased", worker), ("worker_gone", worker))
        assert told(crew, ("worker_released", worker)) == []  # not at once
        told(crew, ("time_passed",), now=crew.next_deadline or 0.0)

    assert ("break_crew", MOST_FAILED_STARTS, FailureCause.STARTS_FAILED) in out


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
    crew = RecordedCrew(CrewRules(max_workers=1))
    told(crew, ("task_submitted", 0))
    for worker in range(1, MOST_FAILED_STARTS + 1):
        told(crew, ("worker_leased", worker), ("worker_warned", worker, True), ("worker_gone", worker))
        told(crew, ("worker_released", worker))
        told(crew, ("time_passed",), now=crew.next_deadline or 0.0)

    assert told(crew, ("task_submitted", 1), now=60.0) == [("lease_worker", MOST_FAILED_STARTS + 1)]


def test_while_another_worker_works_they_do_not() -> None:
    crew = working(CrewRules(max_workers=2), (0, 1))
    now, pauses = 0.0, []
    for worker in range(2, 20):
        out = told(crew, ("worker_leased", worker), ("worker_gone", worker), now=now)
        assert not any(action[0] == "break_crew" for action in out)
        told(crew, ("worker_released", worker), now=now)
        pauses.append((crew.next_deadline or 0.0) - now)
        now += pauses[-1]
        assert told(crew, ("time_passed",), now=now) == [("lease_worker", worker + 1)]

    assert pauses[0] == pytest.approx(0.1)
    assert pauses[-1] == pytest.approx(25.6)


def test_an_interrupt_cancels_what_waits_and_ends_what_runs_and_a_second_one_at_once() -> None:
    crew = working(CrewRules(max_workers=1, retries=5), (0, 1))

    assert told(crew, ("interrupted",)) == [("cancel_task", 1), ("end_worker", 1, EndingWay.INTERRUPT)]
    assert told(crew, ("interrupted",)) == [("end_worker", 1, EndingWay.AT_ONCE)]
    assert told(crew, ("interrupted",)) == []
    assert ("fail_task", 0, 1, FailureCause.INTERRUPTED, 1) in told(crew, ("worker_gone", 1))
    assert told(crew, ("worker_released", 1)) == []
    assert crew.is_stopped


@pytest.mark.parametrize("max_tasks", [1, 2])
def test_a_worker_is_replaced_after_so_many_tasks(max_tasks: int) -> None:
    crew = working(CrewRules(max_workers=1, max_tasks=max_tasks), range(3))
    for task in range(max_tasks - 1):
        told(crew, ("task_settled", 1, task))

    assert told(crew, ("task_settled", 1, max_tasks - 1)) == [("end_worker", 1, EndingWay.QUIETLY)]


def test_a_shut_down_ends_idle_workers_at_once() -> None:
    crew = working(CrewRules(max_workers=1, idle_release_s=1000.0))
    told(crew, ("task_settled", 1, 0))

    assert told(crew, ("shut_down",)) == [("end_worker", 1, EndingWay.QUIETLY)]
