"""What a restart of the server and a reboot of the machine leave of the leases, the queue and the fences."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.decider.evolve import evolve, replay
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import START, Box, key, reading
from tests.core.decider.examples import held, running

# --- fences --------------------------------------------------------------------------------------------------------


def test_every_grant_on_a_node_has_a_larger_fence() -> None:
    box = Box(reading(), awaits_reading_after_release=False)
    fences = []
    for lease_id in ("a", "b", "c"):
        box.ask(lease_id)
        fences.append(box.fence_of(lease_id))
        box.release(lease_id)

    assert fences == [1, 2, 3]


def test_grants_of_one_step_have_different_fences() -> None:
    box = Box()
    box.ask("a")
    box.ask("b")

    box.observe_now(reading(0), reading(1))

    assert (box.fence_of("a"), box.fence_of("b")) == (1, 2)


def test_each_node_has_fences_of_its_own() -> None:
    box = Box(reading(node="x"), reading(node="y"))
    box.ask("a")
    box.ask("b")

    assert (box.fence_of("a"), box.fence_of("b")) == (1, 1)


@pytest.mark.parametrize("is_reboot", [False, True])
def test_fences_grow_through_restarts_and_reboots(is_reboot: bool) -> None:
    box = Box(reading(), awaits_reading_after_release=False)
    for lease_id in ("a", "b"):
        box.ask(lease_id)
        box.release(lease_id)
    box.restart()
    if is_reboot:
        box.reboot()
    box.observe_now(reading())

    box.ask("c")

    assert box.fence_of("c") == 3


# --- restarting ----------------------------------------------------------------------------------------------------


def test_a_restart_keeps_every_lease_and_its_gpu() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")
    box.ask("b")
    before = dict(box.state.leases)

    box.restart()

    assert box.state.leases == before


def test_a_restart_keeps_the_queues_order() -> None:
    box = Box(reading())
    box.ask("holder")
    box.ask("late and poor", priority=-1)
    box.ask("first")
    box.ask("second")
    box.ask("urgent", priority=5)

    box.restart()

    assert list(box.state.queue) == ["urgent", "first", "second", "late and poor"]


def test_a_restart_gives_every_lease_a_full_ttl() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    box.ask("b", ttl_s=40)
    box.pass_time(25)
    box.now += 3600

    box.restart()

    assert (box.expires_in_s("a"), box.expires_in_s("b")) == (30, 40)


def test_a_restart_grants_nothing_before_a_new_look() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")
    box.restart()

    box.ask("b")

    assert box.stage("b") == "queued"


def test_a_restart_grants_nothing_twice() -> None:
    box = Box(reading())
    box.ask("a")
    box.ask("b")

    box.restart()
    box.observe_now(reading())

    assert (box.stage("a"), box.stage("b")) == ("active", "queued")


def test_a_restart_remembers_how_leases_ended() -> None:
    box = Box(reading(), awaits_reading_after_release=False)
    box.ask("a")
    box.release("a")

    box.restart()

    assert box.stage("a") == "released"


def test_who_comes_after_a_restart_stands_behind_who_came_before_it() -> None:
    box = Box(reading())
    for lease_id in ("a", "b", "c"):
        box.ask(lease_id)
    box.restart()

    box.ask("d")

    assert list(box.state.queue) == ["b", "c", "d"]


def test_a_restart_does_not_set_a_draining_gpu_free() -> None:
    box = held()
    box.release("a")
    box.restart()
    box.ask("b")

    box.observe_now(running())

    assert (box.stage("a"), box.stage("b")) == ("draining", "queued")


def test_a_draining_gpu_has_the_full_drain_limit_after_a_restart() -> None:
    box = held(drain_limit_s=60.0)
    box.release("a")
    box.pass_time(50)

    box.restart()

    assert box.expires_in_s("a") == 60


def test_replaying_one_event_at_a_time_gives_the_same_state() -> None:
    box = held()
    box.ask("b")
    box.release("a")
    box.observe_now(reading())
    one_by_one = PoolState(settings=box.settings)
    for event in box.log:
        evolve(one_by_one, event)

    assert one_by_one == replay(PoolState(settings=box.settings), box.log) == box.state


def test_a_refusal_changes_nothing() -> None:
    box = Box(reading())
    before = repr(box.state)

    evolve(box.state, ev.Refused(START + 1e6, ev.RefusalCode.UNSERVABLE, "a", "no"))

    assert (box.state.clock, repr(box.state)) == (START, before)


# --- rebooting -----------------------------------------------------------------------------------------------------


def test_a_reboot_ends_the_leases_of_processes_that_were_on_the_machine() -> None:
    box = held(pid=7)

    box.reboot()

    assert box.stage("a") == "holder_died"


def test_a_reboot_takes_dead_waiters_out_of_the_queue() -> None:
    box = held()
    box.ask("b", pid=8)

    box.reboot()

    assert list(box.state.queue) == []
    assert box.stage("b") == "holder_died"


def test_a_lease_held_from_another_machine_outlives_a_reboot_with_a_full_ttl() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)

    box.reboot()

    assert (box.stage("a"), box.expires_in_s("a")) == ("active", 30)


def test_a_reboot_ends_all_draining() -> None:
    box = held()
    box.release("a")

    box.reboot()

    assert box.stage("a") == "released"


def test_after_a_reboot_the_first_look_serves_who_waits() -> None:
    box = held()
    box.ask("b")
    box.reboot()

    box.observe_now(reading())

    assert box.gpus_of("b") == (key(),)


def test_a_reboot_grants_nothing_before_a_new_look() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")
    box.reboot()

    box.ask("b")

    assert box.stage("b") == "queued"


def test_a_reboot_lets_nobody_share_a_gpu_before_a_new_look() -> None:
    box = Box(reading())
    box.ask("a", memory_mb=1_000)
    box.reboot()

    box.ask("b", memory_mb=1_000)

    assert (box.stage("a"), box.stage("b")) == ("active", "queued")


def test_after_a_reboot_time_goes_on() -> None:
    box = Box(reading())
    box.reboot()
    box.observe_now(reading())
    box.ask("a", ttl_s=30)

    box.pass_time(30)

    assert box.state.clock == START + 35.0
    assert box.stage("a") == "draining"


def test_a_restart_on_the_same_boot_ends_nobody() -> None:
    box = held(pid=7)

    box.restart()

    assert box.stage("a") == "active"
