"""What each may have: quotas and fair share of owners, how many may share a GPU, wait or hold leases, and how much one step does."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain, repeat

import pytest

from gpu_worker_pool.core.decider.decide import MOST_DUE, decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Quota
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import HALF_LIFE_S, OwnerUse, PoolState
from gpu_worker_pool.core.queue.owners import Order
from gpu_worker_pool.core.queue.verdicts import verdict
from gpu_worker_pool.server.routes.plans import share_factor
from tests.core.build import Box, free_at_once, key, reading, refusals, request

HOUR_S = 3600.0


def box_of(gpus: int, **settings: float) -> Box:
    return free_at_once(*(reading(index) for index in range(gpus)), stale_after_s=1e9, **settings)


def in_order(box: Box) -> list[str]:
    return Order(box.state, box.now).lease_ids()


def test_an_owner_has_at_most_its_quota() -> None:
    box = box_of(4)
    box.set_quota("*", Quota(gpus=2))
    box.ask("a", owner="ada")
    box.ask("b", owner="ada")

    box.ask("c", owner="ada", time_limit_s=HOUR_S)
    box.ask("d", owner="bob")

    assert (box.stage("c"), box.stage("d")) == ("queued", "active")
    explained = box.explain("c")
    assert "its owner's quota is 2 GPUs, 2 in use" in str(explained)
    assert sorted(item.verdict.code for item in explained.verdicts) == ["leased", "leased", "leased", "over_quota"]
    box.release("a")
    assert box.stage("c") == "active"


def test_what_could_never_be_had_is_refused_at_once() -> None:
    box = box_of(4)
    box.set_quota("ada", Quota(gpus=2, max_priority=3, max_queued=0))

    wide, urgent = box.ask("a", owner="ada", gpus=3), box.ask("b", owner="ada", priority=4)

    assert "3 GPUs were asked for; the quota of ada allows at most 2" in str(
        refusals(wide, ev.RefusalCode.UNSERVABLE)[0]
    )
    assert "priority 4 was asked for; the quota of ada allows at most 3" in str(
        refusals(urgent, ev.RefusalCode.UNSERVABLE)[0]
    )
    assert refusals(box.ask("c", owner="ada"), ev.RefusalCode.OWNERS_QUEUE_FULL)


# --- fair share ----------------------------------------------------------------------------------------------------


def test_use_fades_to_half_in_a_week() -> None:
    use = OwnerUse()
    use.hold(1000, 0.0, is_firm=True)
    use.hold(-1000, HOUR_S, is_firm=True)
    used = use.used_at(HOUR_S)

    assert used == pytest.approx(1000 * HOUR_S, rel=0.01)
    assert use.used_at(HOUR_S + HALF_LIFE_S) == pytest.approx(used / 2)


def test_the_factor_is_a_half_for_exactly_its_share() -> None:
    assert share_factor(0.0, 10.0, 1.0, 2.0) == 1.0
    assert share_factor(5.0, 10.0, 1.0, 2.0) == 0.5
    assert share_factor(0.0, 0.0, 1.0, 2.0) == 1.0
    assert share_factor(5.0, 10.0, 1.0, 4.0) < share_factor(5.0, 10.0, 1.0, 2.0) < share_factor(4.0, 10.0, 1.0, 2.0)


def test_of_equal_priority_the_owner_that_used_less_comes_first() -> None:
    box = box_of(1, fair_share=True)
    box.ask("first", owner="ada")
    box.pass_time(HOUR_S)
    box.ask("again", owner="ada")
    box.ask("other", owner="bob")
    box.ask("urgent", owner="ada", priority=1)

    assert in_order(box) == ["urgent", "other", "again"]
    assert "bob is ahead, having used less lately" in str(box.explain("again"))
    assert box.explain("again").position == 3


def test_owners_with_weights_1_1_2_get_a_quarter_a_quarter_and_a_half() -> None:
    box = box_of(4, fair_share=True)
    box.set_quota("carol", Quota(weight=2.0))
    used: dict[str, float] = dict.fromkeys(("ada", "bob", "carol"), 0.0)
    running: list[tuple[float, str, str]] = []
    number = 0
    for owner in used:
        for _ in range(8):
            number += 1
            box.ask(f"{owner}-{number}", owner=owner)
    while box.now < 30 * 24 * HOUR_S:
        active = [lease for lease in box.state.leases.values() if hasattr(lease, "granted_at")]
        known = {lease_id for _, lease_id, _ in running}
        for lease in active:
            if lease.id not in known:
                # Each owner's jobs last differently long: it is the GPU time that counts.
                owner = lease.request.holder.owner or ""
                lasts_s = {"ada": 1.0, "bob": 3.0, "carol": 2.0}[owner] * HOUR_S
                running.append((box.now + lasts_s, lease.id, owner))
                used[owner] += lasts_s
        running.sort()
        at, lease_id, owner = running.pop(0)
        box.now = at
        number += 1
        box.ask(f"{owner}-{number}", owner=owner)
        box.release(lease_id)

    total = sum(used.values())
    assert {owner: 100 * part / total for owner, part in used.items()} == pytest.approx(
        {"ada": 25.0, "bob": 25.0, "carol": 50.0}, abs=5.0
    )


# --- shares --------------------------------------------------------------------------------------------------------


def test_an_owner_that_used_little_is_forgotten_when_there_are_very_many() -> None:
    box = Box(reading())
    for number in range(1_500):
        box.ask(f"lease{number}", owner=f"owner{number}")
        box.pass_time(1.0 if number else 3600.0)
        box.release(f"lease{number}")
        box.observe_now(reading())

    assert len(box.state.usage) == 1_000
    assert "owner0" in box.state.usage, "it used most"
    assert "owner1" not in box.state.usage


def test_a_gpu_is_shared_by_so_many_and_the_next_takes_another_gpu_or_waits() -> None:
    box = Box(reading(0), reading(1), max_sharers=2)
    for number in range(5):
        box.ask(f"share{number}", memory_mb=10)
    assert [len(slot.occupants) for slot in box.state.slots.values()] == [2, 2]
    assert box.stage("share4") == "queued"
    found = box.verdict(0, memory_mb=10)
    assert found == verdict("sharers_full", sharers=2, limit=2)
    assert str(found) == "shared by 2 leases, which is the limit for a GPU"
    assert "2 shared by 2 leases, which is the limit for a GPU" in str(box.explain("share4"))


def test_an_owner_has_so_many_leases_and_keeps_no_other_owner_from_the_queue() -> None:
    box = Box(reading(0), max_leases_per_owner=2)
    box.ask("a", owner="alice")
    box.ask("b", owner="alice")
    assert refusals(box.ask("c", owner="alice"), ev.RefusalCode.TOO_MANY_LEASES)
    assert box.stage("c") == "unknown"
    box.ask("d", owner="bob")
    assert box.stage("d") == "queued"
    box.release("a")
    box.ask("c", owner="alice")
    assert box.stage("c") == "queued"
    assert box.state.live_count == {"alice": 2, "bob": 1}


def test_a_step_that_must_stop_early_goes_on_in_the_order_of_the_queue() -> None:
    box = Box(max_sharers=100)
    for number in range(10):
        box.ask(f"share{number}", memory_mb=10)
    whole = deepcopy(box.state)
    parts = step(box.state, cmd.Observe((reading(0),)), box.now, chain(repeat(True, 3), repeat(False)).__next__)
    while box.state.settled_until < box.now:
        events = step(box.state, cmd.Tick(), box.now, chain(repeat(True, 3), repeat(False)).__next__)
        assert sum(isinstance(event, ev.LeaseGranted) for event in events) <= 3
        parts += events
    assert parts == step(whole, cmd.Observe((reading(0),)), box.now)
    assert box.state == whole


def test_one_tick_ends_so_many_leases_and_the_next_ends_the_others() -> None:
    box = Box(reading(0), max_queued_per_owner=1000)
    for number in range(MOST_DUE + 5):
        box.ask(f"lease{number}", ttl_s=10.0)
    assert sum(isinstance(event, ev.LeaseEnded) for event in box.pass_time(20.0)) == MOST_DUE
    assert sum(isinstance(event, ev.LeaseEnded) for event in box.pass_time(0.0)) == 5


def test_a_queue_settled_now_is_settled_at_this_very_instant() -> None:
    # The reading is as old as it may be, to the last bit: its age is 15 s and not more, but 15 s after it was taken is
    # before now, both for rounding. `step` would go on settling the queue for ever.
    now, taken_at = 15.5 + 2**-49, 0.5 + 2**-50
    assert now - taken_at <= 15.0
    state = PoolState(settings=PoolSettings(stale_after_s=15.0))
    for opening in (cmd.TakeOver(0, "boot"), cmd.AnnounceNode("box", "boot")):
        step(state, opening, 0.0)
    looked = cmd.Observe((reading(0, at=taken_at), reading(1, at=taken_at, utilization=95)))
    for command in (looked, cmd.RequestLease("wide", request(gpus=2)), cmd.ServeQueue()):
        replay(state, decide(state, command, now))

    assert state.slots[key(0)].reading is not None
    assert decide(state, cmd.ServeQueue(), now) == []


def test_an_owner_who_has_enough_waiting_is_refused_and_others_are_not() -> None:
    box = Box(reading(0), max_queued_per_owner=2)
    box.ask("holder", owner="ann")
    for number in range(2):
        box.ask(f"ann{number}", owner="ann")
    (refusal,) = box.ask("ann2", owner="ann")
    why = "2 requests of ann are waiting, which is the limit; try later"
    assert refusal == ev.Refused(box.now, ev.RefusalCode.OWNERS_QUEUE_FULL, "ann2", why)
    assert box.stage("ann2") == "unknown"
    box.ask("bob0", owner="bob")
    assert box.stage("bob0") == "queued"
    box.release("ann0")
    box.ask("ann2", owner="ann")
    assert box.stage("ann2") == "queued"


def test_a_full_queue_refuses_everybody_but_those_who_ask_again() -> None:
    box = Box(reading(0), max_queued=1)
    box.ask("holder")
    box.ask("first")
    (refusal,) = box.ask("second", owner="bob")
    why = "1 requests are waiting, which is the limit; try later"
    assert refusal == ev.Refused(box.now, ev.RefusalCode.QUEUE_FULL, "second", why)
    box.ask("first")
    assert box.stage("first") == "queued"
