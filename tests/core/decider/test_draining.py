"""After a lease its GPUs drain: they are granted again only when its processes are seen to be gone."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import EndedLease, EndReason
from tests.core.build import START, Box, key, of_kind, process, reading
from tests.core.decider.examples import held, running

# --- draining ------------------------------------------------------------------------------------------------------


def test_a_released_gpu_is_granted_again_only_after_a_look() -> None:
    box = Box(reading())
    box.ask("a")
    box.ask("b")

    box.release("a")
    assert (box.stage("a"), box.stage("b")) == ("draining", "queued")
    box.observe_now(reading())

    assert (box.stage("a"), box.stage("b")) == ("released", "active")


def test_without_waiting_for_a_look_the_next_has_it_in_the_same_step() -> None:
    box = Box(reading(), awaits_reading_after_release=False)
    box.ask("a")
    box.ask("b")

    box.release("a")

    assert (box.stage("a"), box.stage("b")) == ("released", "active")


def test_a_process_seen_there_keeps_the_gpu_even_without_waiting_for_a_look() -> None:
    box = held(awaits_reading_after_release=False)

    box.release("a")

    assert box.stage("a") == "draining"


def test_a_look_that_began_before_the_end_says_nothing() -> None:
    box = Box(reading())
    box.ask("a")
    box.pass_time(5)
    box.release("a")

    box.observe(reading(at=box.now - 0.001))

    assert box.stage("a") == "draining"


def test_a_look_from_before_the_end_that_comes_after_one_from_after_it_changes_nothing() -> None:
    box = held()
    box.pass_time(5)
    box.release("a")
    box.observe_now(running())

    box.observe(reading(at=box.now - 1))

    assert box.stage("a") == "draining"


def test_a_process_that_is_still_there_keeps_the_gpu_draining() -> None:
    box = held()
    box.release("a")

    box.observe_now(running())

    assert box.stage("a") == "draining"


def test_a_process_that_appears_between_the_last_look_and_the_end_keeps_the_gpu_draining() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.release("a")

    box.observe_now(running())

    assert box.stage("a") == "draining"


def test_the_gpu_is_free_when_the_process_is_gone() -> None:
    box = held()
    box.release("a")
    box.observe_now(running())

    box.observe_now(reading())

    assert box.stage("a") == "released"


def test_the_process_of_somebody_else_does_not_keep_it_draining() -> None:
    box = held()
    box.release("a")

    box.observe_now(running(pid=66))

    assert box.stage("a") == "released"


def test_a_child_keeps_the_gpu_draining() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    child = reading(used_mb=9_000, processes=(process(8, 9_000, parents=(7,)),))
    box.observe_now(child)
    box.release("a")

    box.observe_now(child)

    assert box.stage("a") == "draining"


def test_a_child_whose_parent_died_keeps_the_gpu_draining() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.observe_now(reading(used_mb=9_000, processes=(process(8, 9_000, parents=(7, 1)),)))
    box.do(cmd.EndLease("a", EndReason.HOLDER_DIED))

    box.observe_now(reading(used_mb=9_000, processes=(process(8, 9_000, parents=(1,)),)))

    assert box.stage("a") == "draining"


def test_a_child_whose_parent_died_keeps_the_gpu_through_a_restart() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.observe_now(reading(used_mb=9_000, processes=(process(8, 9_000, parents=(7, 1)),)))
    box.do(cmd.EndLease("a", EndReason.HOLDER_DIED))
    box.restart()

    box.observe_now(reading(used_mb=9_000, processes=(process(8, 9_000, parents=(1,)),)))

    assert box.stage("a") == "draining"


def test_a_grandchild_of_a_child_whose_parent_died_keeps_the_gpu_draining() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.observe_now(reading(processes=(process(8, 9_000, parents=(7,)),)))
    box.release("a")
    box.observe_now(reading(processes=(process(8, 100), process(9, 9_000, parents=(8,)))))

    box.observe_now(reading(processes=(process(9, 9_000, parents=(1,)),)))

    assert box.stage("a") == "draining"


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


def test_a_pid_of_another_machine_does_not_keep_the_gpu() -> None:
    box = held(pid=None)
    box.release("a")

    box.observe_now(running(pid=7))

    assert box.stage("a") == "released"


def test_before_the_drain_limit_the_gpu_is_kept() -> None:
    box = held(drain_limit_s=60.0)
    box.release("a")
    box.pass_time(59.9)

    assert box.stage("a") == "draining"


def test_the_drain_limit_ends_draining_with_the_process_still_there() -> None:
    box = held(drain_limit_s=60.0)
    box.release("a")
    box.pass_time(59)
    box.observe_now(running())

    box.pass_time(1)

    assert box.stage("a") == "released"


def test_after_the_drain_limit_the_thresholds_decide() -> None:
    box = held(drain_limit_s=60.0)
    box.release("a")
    box.ask("strict", memory_threshold_percent=10)
    box.ask("usual", memory_threshold_percent=80)
    box.pass_time(59)
    box.observe_now(running())

    box.pass_time(1)

    assert (box.stage("strict"), box.stage("usual")) == ("queued", "active")


def test_each_gpu_of_a_lease_drains_by_itself() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a", gpus=2, pid=7)
    busy = reading(1, used_mb=9_000, processes=(process(7, 9_000),))
    box.observe_now(reading(0), busy)
    box.ask("b")
    box.release("a")

    box.observe_now(reading(0), busy)

    assert box.gpus_of("b") == (key(0),)
    assert box.stage("a") == "draining"


def test_an_ended_lease_remembers_all_its_gpus_although_they_drained_one_by_one() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a", gpus=2)
    box.release("a")
    box.observe_now(reading(0))
    box.observe_now(reading(1))

    ended = box.state.find("a")

    assert isinstance(ended, EndedLease)
    assert ended.gpus == (key(0), key(1))


def test_the_drain_limit_frees_all_gpus_of_a_lease() -> None:
    box = Box(reading(0), reading(1), drain_limit_s=60.0)
    box.ask("a", gpus=2)
    box.release("a")

    events = box.pass_time(60)

    assert of_kind(events, ev.GpuDrained) == [
        ev.GpuDrained(160.0, "a", key(0)),
        ev.GpuDrained(160.0, "a", key(1)),
    ]


def test_the_same_gpu_twice_in_one_look_is_drained_once() -> None:
    box = Box(reading())
    box.ask("a")
    box.release("a")

    box.observe_now(reading(), reading())

    assert box.stage("a") == "released"


def test_of_two_readings_of_one_gpu_in_one_look_the_newer_counts() -> None:
    box = Box(reading())
    box.pass_time(5)

    box.observe(reading(at=box.now, utilization=95), reading(at=box.now - 1, utilization=0))

    assert box.state.slots[key()].reading == reading(at=box.now, utilization=95)


def test_a_sharer_that_drains_does_not_end_the_others() -> None:
    box = Box(reading())
    box.ask("a", memory_mb=1_000)
    box.ask("b", memory_mb=1_000)
    box.release("a")
    box.observe_now(reading())

    assert (box.stage("a"), box.gpus_of("b")) == ("released", (key(),))


# --- whose processes -----------------------------------------------------------------------------------------------


def test_a_leases_processes_are_written_down_when_they_are_first_seen() -> None:
    box = Box(reading())
    box.ask("a", pid=7)

    events = box.observe_now(running())

    assert of_kind(events, ev.ProcessesAttributed) == [ev.ProcessesAttributed(START, "a", key(), (ProcessId(7, 1.0),))]


def test_they_are_not_written_down_again_while_they_stay_the_same() -> None:
    box = held()

    assert of_kind(box.observe_now(running()), ev.ProcessesAttributed) == []


def test_that_they_are_gone_is_written_down_too() -> None:
    box = held()

    assert of_kind(box.observe_now(reading()), ev.ProcessesAttributed) == [
        ev.ProcessesAttributed(START, "a", key(), ())
    ]
