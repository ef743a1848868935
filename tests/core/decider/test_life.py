"""The life of a lease: asked for, renewed, ended, drained, and through restarts; once is enough, and nothing that ended comes back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.lease import EndedLease, EndReason
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import START, WALL_OFFSET_S, Box, key, of_kind, process, reading, request

ENDINGS: list[tuple[Callable[[str], cmd.Command], str]] = [
    (cmd.Release, "released"),
    (partial(cmd.EndLease, reason=EndReason.REVOKED), "revoked"),
    (partial(cmd.EndLease, reason=EndReason.HOLDER_DIED), "holder_died"),
]


def held(*, pid: int | None = 7, **settings: float) -> Box:
    """One GPU, and a lease `a` on it whose process has been seen there."""
    box = Box(reading(), **settings)
    box.ask("a", pid=pid)
    box.observe_now(running())
    return box


def running(pid: int = 7, started: float | None = 1.0) -> Reading:
    return reading(used_mb=9_000, processes=(process(pid, 9_000, started=started),))


def test_asking_again_for_an_active_lease_does_not_renew_it() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    box.pass_time(20)

    box.ask("a", ttl_s=30)

    assert box.expires_in_s("a") == 10


def test_asking_again_after_the_end_does_not_bring_a_lease_back() -> None:
    box = Box(reading())
    box.ask("a")
    box.release("a")
    box.observe_now(reading())

    assert box.ask("a") == []
    assert box.stage("a") == "released"


@pytest.mark.parametrize(("command", "reason"), ENDINGS)
def test_renewing_an_ended_lease_is_refused_with_how_it_ended(
    command: Callable[[str], cmd.Command], reason: str
) -> None:
    box = Box(reading())
    box.ask("a")
    box.do(command("a"))
    box.observe_now(reading())

    assert box.renew("a") == [ev.Refused(START, ev.RefusalCode.ENDED, "a", EndReason(reason))]
    assert box.stage("a") == reason


def test_a_due_lease_is_refused_even_before_anybody_has_ended_it() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)

    assert decide(box.state, cmd.Renew(("a",)), START + 30) == [
        ev.Refused(START + 30, ev.RefusalCode.ENDED, "a", EndReason.EXPIRED)
    ]


def test_one_refusal_does_not_keep_the_others_from_being_renewed() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    box.pass_time(20)

    box.renew("never heard of", "a")

    assert box.expires_in_s("a") == 30


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


@pytest.mark.parametrize(
    ("seen", "stage"),
    [
        (running(pid=7, started=2.0), "released"),  # a later process with the same pid
        (running(pid=7, started=None), "draining"),  # it may be the lease's
        (reading(processes=None), "draining"),  # it does not tell that the process is gone
    ],
)
def test_a_lease_drains_until_its_processes_are_known_to_be_gone(seen: Reading, stage: str) -> None:
    box = held()
    box.release("a")

    box.observe_now(seen)

    assert box.stage("a") == stage


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


def test_they_are_not_written_down_again_while_they_stay_the_same() -> None:
    box = held()

    assert of_kind(box.observe_now(running()), ev.ProcessesAttributed) == []


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


def from_short(state: PoolState) -> PoolState:
    return replay(PoolState(settings=state.settings, ended=state.ended.copy()), condense(state))


def test_fences_and_places_go_on_growing_where_all_leases_are_gone() -> None:
    box = Box(reading(0))
    for lease_id in "abc":
        box.ask(lease_id)
        box.release(lease_id)
        box.observe_now(reading(0))
    short = from_short(box.state)
    assert short.leases == {}
    assert short.fences == {"box": 3}
    assert short.next_seq == 4


def test_a_pool_that_was_never_opened_condenses_to_its_counters() -> None:
    assert from_short(PoolState()) == PoolState()
    assert condense(PoolState()) == [ev.HistoryCondensed(float("-inf"), (), 1)]
