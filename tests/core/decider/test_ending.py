"""How a lease ends: its time is over, it is released or revoked, its holder dies, or its waiter leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndedLease, EndReason
from tests.core.build import START, WALL_OFFSET_S, Box, key, of_kind, process, reading, request
from tests.core.decider.examples import ENDINGS

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

    box.observe_now(reading())

    assert box.gpus_of("b") == (key(),)


def test_a_clock_that_goes_back_ends_nothing_early_and_nothing_late() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    box.now = 50.0
    box.renew("a")
    assert box.state.ttl_due.due_at("a") == 130.0

    box.now = 130.0
    box.do(cmd.Tick())

    assert box.stage("a") == "draining"


# --- ending --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "reason"), ENDINGS)
def test_a_lease_ends_with_the_reason_it_ended_for(command: Callable[[str], cmd.Command], reason: str) -> None:
    box = Box(reading())
    box.ask("a")

    box.do(command("a"))
    box.observe_now(reading())

    assert box.stage("a") == reason


@pytest.mark.parametrize(("command", "reason"), ENDINGS)
def test_ending_an_unknown_lease_is_refused(command: Callable[[str], cmd.Command], reason: str) -> None:
    assert Box(reading()).do(command("never heard of")) == [
        ev.Refused(START, ev.RefusalCode.UNKNOWN_LEASE, "never heard of")
    ]


@pytest.mark.parametrize(("command", "reason"), ENDINGS)
def test_what_is_over_stays_as_it_ended(command: Callable[[str], cmd.Command], reason: str) -> None:
    box = Box(reading())
    box.ask("a")
    box.release("a")
    while_draining = box.do(command("a"))
    box.observe_now(reading())

    assert while_draining == box.do(command("a")) == []
    assert box.stage("a") == "released"


def test_an_ended_lease_remembers_what_it_had() -> None:
    box = Box(reading())
    box.ask("a")
    box.pass_time(5)
    box.release("a")
    box.observe_now(reading())

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
    box = Box(reading(0), reading(1), reserve_after_s=0.0)
    box.ask("a", time_limit_s=3600.0)
    box.ask("c", gpus=2)
    places, deadlines, reservation = list(box.state.queue), repr(box.state.ttl_due), box.state.reservation
    assert reservation is not None
    slots = {slot.key: dict(slot.occupants) for slot in box.state.slots.values()}

    box.ask("b", gpus=2, priority=1)
    box.release("b")

    assert list(box.state.queue) == places
    assert len(list(box.state.queue.classes)) == 2  # of its owner, and of any
    assert repr(box.state.ttl_due) == deadlines
    assert box.state.reservation == reservation
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

    box.do(cmd.EndLease("b", EndReason.HOLDER_DIED))

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

    assert box.renew("a") == [ev.Refused(START, ev.RefusalCode.UNKNOWN_LEASE, "a")]


def test_an_active_lease_of_a_watched_process_has_no_deadline() -> None:
    box = Box(reading())
    box.ask("local", pid=7, ttl_s=10.0)

    assert box.expires_in_s("local") is None
    box.pass_time(1e6)
    assert box.stage("local") == "active"
    box.renew("local")
    box.restart()
    assert box.expires_in_s("local") is None
    box.pass_time(1e6)
    box.do(cmd.EndLease("local", EndReason.HOLDER_DIED))
    assert box.stage("local") == "draining"


def test_a_queued_request_of_a_watched_process_needs_a_sign_of_life() -> None:
    box = Box(reading())
    box.ask("first", pid=7, ttl_s=10.0)
    box.ask("second", pid=8, ttl_s=10.0)

    box.pass_time(10.0)

    assert (box.stage("first"), box.stage("second")) == ("active", "expired")


def test_a_release_by_another_caller_waits_for_the_processes_whatever_their_memory() -> None:
    box = Box(reading())
    box.ask("victim", pid=7)
    box.observe_now(reading(used_mb=300, processes=(process(7, 300),)))
    box.ask("next", pid=8)

    box.do(cmd.Release("victim", by="bob", why="the demo"))
    box.pass_time(1.0)
    box.observe_now(reading(used_mb=300, processes=(process(7, 300),)))
    assert (box.stage("victim"), box.stage("next")) == ("draining", "queued")

    box.pass_time(1.0)
    box.observe_now(reading())
    ended = box.state.ended["victim"]
    assert (ended.reason, ended.by, ended.why, box.stage("next")) == ("released", "bob", "the demo", "active")


def test_a_process_does_not_reclaim_a_gpu_that_another_caller_released() -> None:
    box = Box(reading())
    box.ask("victim", pid=7)
    box.observe_now(reading(used_mb=300, processes=(process(7, 300),)))
    box.do(cmd.Release("victim", by="bob"))
    box.pass_time(1.0)
    box.observe_now(reading(used_mb=300, processes=(process(7, 300),)))

    box.ask("again", pid=7)

    assert box.stage("again") == "queued"


def test_a_release_without_a_name_is_told_from_the_holders_own() -> None:
    box = Box(reading())
    box.ask("a")

    box.do(cmd.Release("a"))
    box.pass_time(1.0)
    box.observe_now(reading())

    assert box.state.ended["a"].by == "an unnamed caller"


def test_by_and_why_survive_a_restart_while_the_lease_drains() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.observe_now(reading(used_mb=300, processes=(process(7, 300),)))
    box.do(cmd.EndLease("a", EndReason.REVOKED, by="root", why="maintenance"))

    box.restart()

    lease = box.state.leases["a"]
    assert isinstance(lease, EndedLease)
    assert (lease.by, lease.why) == ("root", "maintenance")
