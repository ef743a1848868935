"""The state of a pool at a glance."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.model.lease import QueuedLease
from tests.core.build import START, WALL_OFFSET_S, Box, reading, request


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
