"""How a lease ends: its time is over, it is released or revoked, its holder dies, or its waiter leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndedLease, EndReason
from tests.core.build import START, WALL_OFFSET_S, Box, key, process, reading, request
from tests.core.decider.examples import ENDINGS

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
    assert repr(box.state.ttl_due) == deadlines
    assert box.state.reservation == reservation
    assert {slot.key: dict(slot.occupants) for slot in box.state.slots.values()} == slots


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
