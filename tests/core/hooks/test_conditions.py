"""What lasts is found by the state of the pool."""

from __future__ import annotations

from gpu_worker_pool.core.hooks.conditions import idle_leases, unknown_nodes
from tests.core.build import Box, reading


def test_a_node_is_unknown_when_none_of_its_gpus_was_read_lately() -> None:
    box = Box(reading(0), reading(1))
    assert unknown_nodes(box.state, box.now) == set()

    later = box.now + box.state.settings.stale_after_s + 1.0

    assert unknown_nodes(box.state, later) == {next(iter(box.state.slots)).node}


def test_a_lease_is_idle_when_its_gpus_compute_nothing_for_long() -> None:
    box = Box(reading(0), idle_after_s=100.0, stale_after_s=1e9)
    box.ask("a")
    assert idle_leases(box.state, box.now) == set()

    assert idle_leases(box.state, box.now + 1_000.0) == {"a"}
