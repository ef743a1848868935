"""Asking for a lease and renewing it: once is enough, twice is harmless, and nothing that ended comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndReason
from tests.core.build import START, Box, reading
from tests.core.decider.examples import ENDINGS

# --- asking --------------------------------------------------------------------------------------------------------


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


# --- renewing ------------------------------------------------------------------------------------------------------


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
