"""The life of a lease: asked for, granted, renewed, ended, drained; and what a restart or a reboot leaves of it."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import evolve, replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId, Reading
from gpu_worker_pool.core.model.lease import EndedLease, EndReason, QueuedLease
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import START, WALL_OFFSET_S, Box, key, of_kind, process, reading, request

ENDINGS: list[tuple[type[cmd.Release | cmd.Revoke | cmd.ReportDeath], str]] = [
    (cmd.Release, "released"),
    (cmd.Revoke, "revoked"),
    (cmd.ReportDeath, "holder_died"),
]


def held(*, pid: int | None = 7, **settings: float) -> Box:
    """One GPU, and a lease `a` on it whose process has been seen there."""
    box = Box(reading(), **settings)
    box.ask("a", pid=pid)
    box.look(running())
    return box


def running(pid: int = 7, started: float | None = 1.0) -> Reading:
    return reading(used_mb=9_000, processes=(process(pid, 9_000, started=started),))


# --- asking --------------------------------------------------------------------------------------------------------


def test_a_free_gpu_is_granted_in_the_same_step() -> None:
    box = Box(reading())

    events = box.ask("a")

    assert of_kind(events, ev.LeaseGranted) == [ev.LeaseGranted(START, "a", (key(),), 1, START + WALL_OFFSET_S)]


def test_asking_again_does_not_take_a_second_gpu() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")

    assert box.ask("a") == []
    assert len(box.gpus_of("a")) == 1


def test_asking_again_while_queued_keeps_ones_place() -> None:
    box = Box(reading())
    for lease_id in ("a", "b", "c"):
        box.ask(lease_id)

    box.ask("b")

    assert list(box.state.queue) == ["b", "c"]


def test_asking_again_while_queued_is_a_sign_of_life() -> None:
    box = Box(reading())
    box.ask("a")
    box.ask("b", ttl_s=30)
    box.pass_time(20)

    box.ask("b", ttl_s=30)

    assert box.expires_in_s("b") == 30


def test_asking_again_for_an_active_lease_does_not_renew_it() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    box.pass_time(20)

    box.ask("a", ttl_s=30)

    assert box.expires_in_s("a") == 10


@pytest.mark.parametrize(
    "other", [{"gpus": 2}, {"memory_mb": 1_000}, {"model": "A100"}, {"priority": 1}, {"worker": "x"}]
)
def test_the_same_id_with_other_wishes_is_a_conflict(other: dict[str, int | str]) -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")

    assert box.ask("a", **other) == [ev.LeaseConflicted(START, "a")]


def test_a_conflict_leaves_the_lease_as_it_was() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")
    before = box.state.leases["a"]

    box.ask("a", gpus=2)

    assert box.state.leases["a"] == before


def test_asking_again_after_the_end_does_not_bring_a_lease_back() -> None:
    box = Box(reading())
    box.ask("a")
    box.release("a")
    box.look(reading())

    assert box.ask("a") == []
    assert box.stage("a") == "released"


def test_an_ended_lease_still_conflicts_with_other_wishes() -> None:
    box = Box(reading())
    box.ask("a")
    box.release("a")

    assert box.ask("a", model="A100") == [ev.LeaseConflicted(START, "a")]


# --- renewing ------------------------------------------------------------------------------------------------------


def test_a_renewal_gives_the_full_ttl_again() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    box.pass_time(20)

    box.renew("a")

    assert box.expires_in_s("a") == 30


def test_a_lease_that_is_renewed_outlives_its_first_ttl() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    for _ in range(10):
        box.pass_time(10)
        box.renew("a")

    assert box.stage("a") == "active"


def test_all_leases_of_a_client_are_renewed_in_one_event() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")
    box.ask("b")

    assert box.renew("a", "b", "a") == [ev.LeasesRenewed(START, ("a", "b"))]


def test_renewing_an_unknown_lease_is_refused() -> None:
    assert Box(reading()).renew("never heard of") == [ev.LeaseUnknown(START, "never heard of")]


def test_renewing_an_unknown_lease_does_not_create_it() -> None:
    box = Box(reading())

    box.renew("never heard of")

    assert box.stage("never heard of") == "unknown"


@pytest.mark.parametrize(("command", "reason"), ENDINGS)
def test_renewing_an_ended_lease_is_refused_with_how_it_ended(command: type[cmd.Release], reason: str) -> None:
    box = Box(reading())
    box.ask("a")
    box.do(command("a"))
    box.look(reading())

    assert box.renew("a") == [ev.RenewalRefused(START, "a", EndReason(reason))]
    assert box.stage("a") == reason


def test_renewing_a_draining_lease_is_refused_with_how_it_ended() -> None:
    box = held()
    box.release("a")

    assert box.renew("a") == [ev.RenewalRefused(START, "a", EndReason.RELEASED)]


def test_a_renewal_at_the_last_instant_comes_too_late() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    box.now += 30

    events = box.renew("a")

    assert of_kind(events, ev.RenewalRefused) == [ev.RenewalRefused(box.now, "a", EndReason.EXPIRED)]


def test_a_due_lease_is_refused_even_before_anybody_has_ended_it() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)

    assert decide(box.state, cmd.Renew(("a",)), START + 30) == [ev.RenewalRefused(START + 30, "a", EndReason.EXPIRED)]


def test_one_refusal_does_not_keep_the_others_from_being_renewed() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    box.pass_time(20)

    box.renew("never heard of", "a")

    assert box.expires_in_s("a") == 30


# --- expiring ------------------------------------------------------------------------------------------------------


def test_a_lease_lives_until_its_ttl_is_over() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    box.pass_time(29.9)

    assert box.stage("a") == "active"


def test_a_lease_without_a_sign_of_life_expires() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)

    (event,) = of_kind(box.pass_time(30), ev.LeaseEnded)

    assert event == ev.LeaseEnded(130.0, "a", EndReason.EXPIRED, (key(),), 130.0 + WALL_OFFSET_S)


def test_the_ttl_counts_from_the_grant_and_not_from_the_asking() -> None:
    box = Box(reading(), awaits_reading_after_release=False)
    box.ask("a")
    box.ask("b", ttl_s=30)
    box.pass_time(10)

    box.release("a")

    assert box.expires_in_s("b") == 30


def test_a_waiter_without_a_sign_of_life_leaves_the_queue() -> None:
    box = Box(reading())
    box.ask("a")
    box.ask("b", ttl_s=30)

    box.pass_time(30)

    assert box.stage("b") == "expired"
    assert list(box.state.queue) == []


def test_a_waiter_who_renews_stays_in_the_queue() -> None:
    box = Box(reading())
    box.ask("a")
    box.ask("b", ttl_s=30)
    box.pass_time(20)
    box.renew("b")

    box.pass_time(20)

    assert box.stage("b") == "queued"


def test_a_waiter_who_is_due_is_not_granted_what_frees_up_too_late() -> None:
    box = Box(reading(), awaits_reading_after_release=False)
    box.ask("a")
    box.ask("b", ttl_s=30)
    box.now += 30

    box.release("a")

    assert box.stage("b") == "expired"


def test_every_command_ends_what_is_due_first() -> None:
    box = Box(reading(), awaits_reading_after_release=False)
    box.ask("a", ttl_s=10)
    box.now += 10

    box.ask("b")

    assert (box.stage("a"), box.stage("b")) == ("expired", "active")


def test_an_expired_leases_gpu_goes_to_the_next_once_it_is_seen_to_be_free() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=10)
    box.ask("b")
    box.pass_time(10)

    box.look(reading())

    assert box.gpus_of("b") == (key(),)


def test_a_clock_that_goes_back_ends_nothing_early_and_nothing_late() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    box.now = 50.0
    box.renew("a")
    assert box.state.agenda.due_at("a") == 130.0

    box.now = 130.0
    box.do(cmd.Tick())

    assert box.stage("a") == "draining"


# --- ending --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "reason"), ENDINGS)
def test_a_lease_ends_with_the_reason_it_ended_for(command: type[cmd.Release], reason: str) -> None:
    box = Box(reading())
    box.ask("a")

    box.do(command("a"))
    box.look(reading())

    assert box.stage("a") == reason


@pytest.mark.parametrize(("command", "reason"), ENDINGS)
def test_ending_an_unknown_lease_is_refused(command: type[cmd.Release], reason: str) -> None:
    assert Box(reading()).do(command("never heard of")) == [ev.LeaseUnknown(START, "never heard of")]


@pytest.mark.parametrize(("command", "reason"), ENDINGS)
def test_what_is_over_stays_as_it_ended(command: type[cmd.Release], reason: str) -> None:
    box = Box(reading())
    box.ask("a")
    box.release("a")
    while_draining = box.do(command("a"))
    box.look(reading())

    assert while_draining == box.do(command("a")) == []
    assert box.stage("a") == "released"


def test_an_ended_lease_remembers_what_it_had() -> None:
    box = Box(reading())
    box.ask("a")
    box.pass_time(5)
    box.release("a")
    box.look(reading())

    assert box.state.find("a") == EndedLease(
        "a",
        request(worker="a"),
        (key(),),
        fence=1,
        requested_at=START + WALL_OFFSET_S,
        granted_at=START + WALL_OFFSET_S,
        ended_at=START + 5 + WALL_OFFSET_S,
        reason=EndReason.RELEASED,
    )


def test_leaving_the_queue_is_a_cancellation() -> None:
    box = Box(reading())
    box.ask("a")
    box.ask("b")

    box.release("b")

    assert box.stage("b") == "cancelled"


def test_a_cancelled_waiter_leaves_no_trace() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")
    box.ask("c", gpus=2)
    places, agenda, holds = list(box.state.queue), repr(box.state.agenda), dict(box.state.holds)
    slots = {slot.key: dict(slot.occupants) for slot in box.state.slots.values()}

    box.ask("b", gpus=2, priority=1)
    box.release("b")

    assert list(box.state.queue) == places
    assert repr(box.state.queue) == "<WaitingLine: 1 waiting, 1 kinds of wishes>"
    assert repr(box.state.agenda) == agenda
    assert box.state.holds == holds
    assert {slot.key: dict(slot.occupants) for slot in box.state.slots.values()} == slots


def test_a_cancelled_waiter_is_never_granted() -> None:
    box = Box(reading(), awaits_reading_after_release=False)
    box.ask("a")
    box.ask("b")
    box.ask("c")
    box.release("b")

    box.release("a")

    assert (box.stage("b"), box.stage("c")) == ("cancelled", "active")


def test_a_waiter_who_died_leaves_the_queue() -> None:
    box = Box(reading())
    box.ask("a")
    box.ask("b")

    box.do(cmd.ReportDeath("b"))

    assert box.stage("b") == "holder_died"
    assert list(box.state.queue) == []


def test_only_so_many_ended_leases_are_remembered() -> None:
    box = Box(reading(), remembered_ended_leases=2)
    box.ask("holder")
    for lease_id in ("a", "b", "c"):
        box.ask(lease_id)
        box.release(lease_id)

    assert list(box.state.ended) == ["b", "c"]


def test_a_forgotten_lease_is_unknown() -> None:
    box = Box(reading(), remembered_ended_leases=0)
    box.ask("holder")
    box.ask("a")
    box.release("a")

    assert box.renew("a") == [ev.LeaseUnknown(START, "a")]


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

    box.look(reading(0), reading(1))

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
    box.look(reading())

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
    box.look(reading())

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

    box.look(running())

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
    box.look(reading())
    one_by_one = PoolState(settings=box.settings)
    for event in box.log:
        evolve(one_by_one, event)

    assert one_by_one == replay(PoolState(settings=box.settings), box.log) == box.state


def test_a_refusal_changes_nothing() -> None:
    box = Box(reading())
    before = repr(box.state)

    evolve(box.state, ev.LeaseRefused(START + 1e6, "a", "no"))

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

    box.look(reading())

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


def test_after_a_reboot_nobody_is_refused_before_a_new_look() -> None:
    box = Box(reading())
    box.reboot()

    box.ask("a", gpus=2)

    assert box.stage("a") == "queued"


def test_after_a_reboot_time_counts_from_the_new_clock() -> None:
    box = Box(reading())
    box.reboot()
    box.look(reading())
    box.ask("a", ttl_s=30)

    box.pass_time(30)

    assert box.state.clock == 35.0
    assert box.stage("a") == "draining"


def test_a_restart_on_the_same_boot_ends_nobody() -> None:
    box = held(pid=7)

    box.restart()

    assert box.stage("a") == "active"


# --- draining ------------------------------------------------------------------------------------------------------


def test_a_released_gpu_is_granted_again_only_after_a_look() -> None:
    box = Box(reading())
    box.ask("a")
    box.ask("b")

    box.release("a")
    assert (box.stage("a"), box.stage("b")) == ("draining", "queued")
    box.look(reading())

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
    box.look(running())

    box.observe(reading(at=box.now - 1))

    assert box.stage("a") == "draining"


def test_a_process_that_is_still_there_keeps_the_gpu_draining() -> None:
    box = held()
    box.release("a")

    box.look(running())

    assert box.stage("a") == "draining"


def test_a_process_that_appears_between_the_last_look_and_the_end_keeps_the_gpu_draining() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.release("a")

    box.look(running())

    assert box.stage("a") == "draining"


def test_the_gpu_is_free_when_the_process_is_gone() -> None:
    box = held()
    box.release("a")
    box.look(running())

    box.look(reading())

    assert box.stage("a") == "released"


def test_the_process_of_somebody_else_does_not_keep_it_draining() -> None:
    box = held()
    box.release("a")

    box.look(running(pid=66))

    assert box.stage("a") == "released"


def test_a_child_keeps_the_gpu_draining() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    child = reading(used_mb=9_000, processes=(process(8, 9_000, parents=(7,)),))
    box.look(child)
    box.release("a")

    box.look(child)

    assert box.stage("a") == "draining"


def test_a_child_whose_parent_died_keeps_the_gpu_draining() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.look(reading(used_mb=9_000, processes=(process(8, 9_000, parents=(7, 1)),)))
    box.do(cmd.ReportDeath("a"))

    box.look(reading(used_mb=9_000, processes=(process(8, 9_000, parents=(1,)),)))

    assert box.stage("a") == "draining"


def test_a_child_whose_parent_died_keeps_the_gpu_through_a_restart() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.look(reading(used_mb=9_000, processes=(process(8, 9_000, parents=(7, 1)),)))
    box.do(cmd.ReportDeath("a"))
    box.restart()

    box.look(reading(used_mb=9_000, processes=(process(8, 9_000, parents=(1,)),)))

    assert box.stage("a") == "draining"


def test_a_grandchild_of_a_child_whose_parent_died_keeps_the_gpu_draining() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.look(reading(processes=(process(8, 9_000, parents=(7,)),)))
    box.release("a")
    box.look(reading(processes=(process(8, 100), process(9, 9_000, parents=(8,)))))

    box.look(reading(processes=(process(9, 9_000, parents=(1,)),)))

    assert box.stage("a") == "draining"


def test_a_later_process_with_the_same_pid_is_somebody_else() -> None:
    box = held()
    box.release("a")

    box.look(running(pid=7, started=2.0))

    assert box.stage("a") == "released"


def test_a_process_of_unknown_start_time_is_taken_for_the_leases() -> None:
    box = held()
    box.release("a")

    box.look(running(pid=7, started=None))

    assert box.stage("a") == "draining"


def test_a_look_without_a_process_list_does_not_tell_that_a_process_is_gone() -> None:
    box = held()
    box.release("a")

    box.look(reading(processes=None))

    assert box.stage("a") == "draining"


def test_a_look_without_a_process_list_is_enough_where_no_process_was_ever_seen() -> None:
    box = Box(reading(processes=None))
    box.ask("a")
    box.release("a")

    box.look(reading(processes=None))

    assert box.stage("a") == "released"


def test_a_pid_of_another_machine_does_not_keep_the_gpu() -> None:
    box = held(pid=None)
    box.release("a")

    box.look(running(pid=7))

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
    box.look(running())

    box.pass_time(1)

    assert box.stage("a") == "released"


def test_after_the_drain_limit_the_thresholds_decide() -> None:
    box = held(drain_limit_s=60.0)
    box.release("a")
    box.ask("strict", memory_threshold_percent=10)
    box.ask("usual")
    box.pass_time(59)
    box.look(running())

    box.pass_time(1)

    assert (box.stage("strict"), box.stage("usual")) == ("queued", "active")


def test_each_gpu_of_a_lease_drains_by_itself() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a", gpus=2, pid=7)
    busy = reading(1, used_mb=9_000, processes=(process(7, 9_000),))
    box.look(reading(0), busy)
    box.ask("b")
    box.release("a")

    box.look(reading(0), busy)

    assert box.gpus_of("b") == (key(0),)
    assert box.stage("a") == "draining"


def test_an_ended_lease_remembers_all_its_gpus_although_they_drained_one_by_one() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a", gpus=2)
    box.release("a")
    box.look(reading(0))
    box.look(reading(1))

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

    box.look(reading(), reading())

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
    box.look(reading())

    assert (box.stage("a"), box.gpus_of("b")) == ("released", (key(),))


# --- whose processes -----------------------------------------------------------------------------------------------


def test_a_leases_processes_are_written_down_when_they_are_first_seen() -> None:
    box = Box(reading())
    box.ask("a", pid=7)

    events = box.look(running())

    assert of_kind(events, ev.ProcessesAttributed) == [ev.ProcessesAttributed(START, "a", key(), (ProcessId(7, 1.0),))]


def test_they_are_not_written_down_again_while_they_stay_the_same() -> None:
    box = held()

    assert of_kind(box.look(running()), ev.ProcessesAttributed) == []


def test_that_they_are_gone_is_written_down_too() -> None:
    box = held()

    assert of_kind(box.look(reading()), ev.ProcessesAttributed) == [ev.ProcessesAttributed(START, "a", key(), ())]


# --- the state at a glance -----------------------------------------------------------------------------------------


def test_the_state_reads_as_how_many_of_what() -> None:
    box = Box(reading(0), reading(1))
    for lease_id in ("a", "b", "c"):
        box.ask(lease_id)
    box.release("a")

    assert repr(box.state) == "<PoolState: 2 GPUs, 1 active, 1 draining, 1 queued>"


def test_a_queued_lease_knows_its_wall_clock_time() -> None:
    box = Box()
    box.ask("a")

    assert box.state.leases["a"] == QueuedLease("a", request(worker="a"), 1, START + WALL_OFFSET_S)


def test_what_was_granted_cannot_be_taken_for_waiting() -> None:
    box = Box(reading())
    box.ask("a")

    with pytest.raises(AssertionError):
        box.state.queued("a")


# What a process leaves behind


def test_who_gives_a_gpu_back_and_lives_on_may_keep_a_context_there() -> None:
    box = Box(reading())
    box.ask("a", pid=1)
    box.ask("b", pid=2)
    box.look(reading(used_mb=20_000, processes=(process(1, 20_000),)))
    box.release("a")
    box.pass_time(0.1)
    box.look(reading(used_mb=500, processes=(process(1, 500),)))
    assert box.gpus_of("b") == (key(),)


def test_more_than_a_context_keeps_the_gpu_from_others() -> None:
    box = Box(reading())
    box.ask("a", pid=1)
    box.ask("b", pid=2)
    box.look(reading(used_mb=20_000, processes=(process(1, 20_000),)))
    box.release("a")
    box.pass_time(0.1)
    box.look(reading(used_mb=20_000, processes=(process(1, 20_000),)))
    assert box.stage("b") == "queued"
    assert "pid 1 still holds 19.5 GiB" in str(box.explain("b"))


def test_workers_of_one_program_hand_a_gpu_on_though_the_program_keeps_its_memory() -> None:
    box = Box(reading())
    box.ask("first", pid=1)
    box.look(reading(used_mb=70_000, utilization=99, processes=(process(1, 70_000),)))
    box.ask("second", pid=1)
    box.release("first")
    assert box.gpus_of("second") == (key(),)
    box.pass_time(0.1)
    box.look(reading(used_mb=70_000, utilization=99, processes=(process(1, 70_000),)))
    assert box.stage("first") == "released"
    assert box.stage("second") == "active"


def test_a_program_that_asks_again_gets_the_gpu_it_keeps_warm() -> None:
    box = Box(reading())
    box.ask("first", pid=1)
    box.look(reading(used_mb=70_000, processes=(process(1, 70_000),)))
    box.release("first")
    box.pass_time(0.1)
    box.look(reading(used_mb=70_000, processes=(process(1, 70_000),)))
    assert box.stage("first") == "draining"
    box.ask("second", pid=1)
    assert box.gpus_of("second") == (key(),)


def test_a_program_that_keeps_a_gpu_warm_does_not_overtake_somebody_ahead() -> None:
    box = Box(reading())
    box.ask("first", pid=1)
    box.look(reading(used_mb=70_000, processes=(process(1, 70_000),)))
    box.ask("other", pid=2)
    box.ask("second", pid=1)
    box.release("first")
    assert box.stage("other") == "queued"
    assert box.stage("second") == "queued"
    box.pass_time(0.1)
    box.look(reading(used_mb=0))
    assert box.gpus_of("other") == (key(),)


def test_memory_of_others_on_a_warm_gpu_still_counts() -> None:
    box = Box(reading())
    box.ask("first", pid=1)
    full = reading(used_mb=75_000, processes=(process(1, 10_000), process(9, 65_000)))
    box.look(full)
    box.release("first")
    box.pass_time(0.1)
    box.look(full)
    box.ask("second", pid=1)
    assert box.stage("second") == "queued"


def test_of_two_leases_of_a_program_on_one_gpu_the_second_to_drain_is_still_its_own() -> None:
    box = Box(reading())
    for name in ("a", "b"):
        box.ask(name, pid=1, memory_mb=8_000)
    box.look(reading(used_mb=16_000, processes=(process(1, 16_000),)))
    box.release("a")
    box.pass_time(1)
    box.release("b")
    box.pass_time(59.5)
    assert (box.stage("a"), box.stage("b")) == ("released", "draining")
    box.look(reading(used_mb=16_000, processes=(process(1, 16_000),)))
    box.ask("c", pid=1)
    assert box.gpus_of("c") == (key(),)


def test_what_somebody_else_left_is_not_had_by_claiming_his_pid() -> None:
    box = Box(reading())
    box.ask("first", pid=1, owner="ada")
    box.look(reading(used_mb=70_000, processes=(process(1, 70_000),)))
    box.release("first")
    box.pass_time(0.1)
    box.look(reading(used_mb=70_000, processes=(process(1, 70_000),)))
    box.ask("second", pid=1, owner="eve")
    assert box.stage("second") == "queued"
