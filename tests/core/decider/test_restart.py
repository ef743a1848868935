"""What a restart of the server and a reboot of the machine leave of the leases, the queue and the fences."""

from __future__ import annotations

import pytest

from tests.core.build import Box, reading

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


# --- rebooting -----------------------------------------------------------------------------------------------------
