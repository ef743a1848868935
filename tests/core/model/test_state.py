"""The state of a pool at a glance."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.state import PoolState
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


def test_what_is_due_after_lost_time_is_due_when_it_is_said_to_be() -> None:
    """125.2 + 80 - 80 is less than 125.2."""
    state = PoolState(lost_s=80.0)
    state.ttl_due.set("a", 125.2)

    assert state.has_due(state.next_due_at())
