"""The state of a pool at a glance."""

from __future__ import annotations

from gpu_worker_pool.core.model.state import PoolState


def test_what_is_due_after_lost_time_is_due_when_it_is_said_to_be() -> None:
    """125.2 + 80 - 80 is less than 125.2."""
    state = PoolState(lost_s=80.0)
    state.ttl_due.set("a", 125.2)

    assert state.has_due(state.next_due_at())
