"""After a lease its GPUs drain: they are granted again only when its processes are seen to be gone."""

from __future__ import annotations

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndedLease
from tests.core.build import Box, key, of_kind, reading
from tests.core.decider.examples import held, running

# --- draining ------------------------------------------------------------------------------------------------------


def test_a_later_process_with_the_same_pid_is_somebody_else() -> None:
    box = held()
    box.release("a")

    box.observe_now(running(pid=7, started=2.0))

    assert box.stage("a") == "released"


def test_a_process_of_unknown_start_time_is_taken_for_the_leases() -> None:
    box = held()
    box.release("a")

    box.observe_now(running(pid=7, started=None))

    assert box.stage("a") == "draining"


def test_a_look_without_a_process_list_does_not_tell_that_a_process_is_gone() -> None:
    box = held()
    box.release("a")

    box.observe_now(reading(processes=None))

    assert box.stage("a") == "draining"


def test_a_look_without_a_process_list_is_enough_where_no_process_was_ever_seen() -> None:
    box = Box(reading(processes=None))
    box.ask("a")
    box.release("a")

    box.observe_now(reading(processes=None))

    assert box.stage("a") == "released"


def test_an_ended_lease_remembers_all_its_gpus_although_they_drained_one_by_one() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a", gpus=2)
    box.release("a")
    box.observe_now(reading(0))
    box.observe_now(reading(1))

    ended = box.state.find("a")

    assert isinstance(ended, EndedLease)
    assert ended.gpus == (key(0), key(1))


# --- whose processes -----------------------------------------------------------------------------------------------


def test_they_are_not_written_down_again_while_they_stay_the_same() -> None:
    box = held()

    assert of_kind(box.observe_now(running()), ev.ProcessesAttributed) == []
