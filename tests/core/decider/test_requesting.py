"""Asking for a lease and renewing it: once is enough, twice is harmless, and nothing that ended comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndReason
from tests.core.build import START, WALL_OFFSET_S, Box, key, reading, request
from tests.core.decider.examples import ENDINGS, held

# --- asking --------------------------------------------------------------------------------------------------------


def test_a_lease_that_is_granted_at_once_is_never_queued() -> None:
    box = Box(reading())

    granted, *others = box.ask("a")

    asked: dict[str, Any] = {"request": request(worker="a"), "seq": 1}
    assert granted == ev.LeaseGranted(START, "a", (key(),), 1, START + WALL_OFFSET_S, **asked)
    assert not any(isinstance(event, ev.DurableEvent) for event in others)


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

    assert box.ask("a", **other) == [ev.Refused(START, ev.RefusalCode.CONFLICT, "a")]


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
    box.observe_now(reading())

    assert box.ask("a") == []
    assert box.stage("a") == "released"


def test_an_ended_lease_still_conflicts_with_other_wishes() -> None:
    box = Box(reading())
    box.ask("a")
    box.release("a")

    assert box.ask("a", model="A100") == [ev.Refused(START, ev.RefusalCode.CONFLICT, "a")]


# --- renewing ------------------------------------------------------------------------------------------------------


def test_all_leases_of_a_client_are_renewed_in_one_event() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")
    box.ask("b")

    assert box.renew("a", "b", "a") == [ev.LeasesRenewed(START, ("a", "b"))]


def test_renewing_an_unknown_lease_is_refused() -> None:
    assert Box(reading()).renew("never heard of") == [ev.Refused(START, ev.RefusalCode.UNKNOWN_LEASE, "never heard of")]


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


def test_renewing_a_draining_lease_is_refused_with_how_it_ended() -> None:
    box = held()
    box.release("a")

    assert box.renew("a") == [ev.Refused(START, ev.RefusalCode.ENDED, "a", EndReason.RELEASED)]


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
