"""Quotas and fair share: which owner comes first, and which may have no more."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Quota
from gpu_worker_pool.core.model.state import HALF_LIFE_S, OwnerUse
from gpu_worker_pool.core.queue.owners import Order
from gpu_worker_pool.server.routes.plans import share_factor
from tests.core.build import Box, free_at_once, reading, refusals

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
