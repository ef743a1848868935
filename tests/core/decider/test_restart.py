"""What a restart of the server and a reboot of the machine leave of the leases, the queue and the fences."""

from __future__ import annotations

import pytest

from tests.core.build import START, Box, reading
from tests.core.decider.examples import held

# --- fences --------------------------------------------------------------------------------------------------------


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


# --- rebooting -----------------------------------------------------------------------------------------------------


def test_a_reboot_ends_the_leases_of_processes_that_were_on_the_machine() -> None:
    box = held(pid=7)

    box.reboot()

    assert box.stage("a") == "holder_died"


def test_after_a_reboot_time_goes_on() -> None:
    box = Box(reading())
    box.reboot()
    box.observe_now(reading())
    box.ask("a", ttl_s=30)

    box.pass_time(30)

    assert box.state.clock == START + 35.0
    assert box.stage("a") == "draining"
