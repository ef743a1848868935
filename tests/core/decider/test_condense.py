"""A condensed history adds up to the same pool as the long one. The property tests check that after every history."""

from __future__ import annotations

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import Box, reading


def from_short(state: PoolState) -> PoolState:
    return replay(PoolState(settings=state.settings, ended=state.ended.copy()), condense(state))


def test_fences_and_places_go_on_growing_where_all_leases_are_gone() -> None:
    box = Box(reading(0))
    for lease_id in "abc":
        box.ask(lease_id)
        box.release(lease_id)
        box.observe_now(reading(0))
    short = from_short(box.state)
    assert short.leases == {}
    assert short.fences == {"box": 3}
    assert short.next_seq == 4


def test_a_pool_that_was_never_opened_condenses_to_its_counters() -> None:
    assert from_short(PoolState()) == PoolState()
    assert condense(PoolState()) == [ev.HistoryCondensed(float("-inf"), (), 1)]
