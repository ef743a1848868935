"""The core decides as it did when it sorted all GPUs for each request and tried each waiter in each pass."""

from __future__ import annotations

from copy import copy
from math import inf
from typing import Any

import pytest
from gpu_worker_pool.core.queue.reclaim import reclaim

from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.serve import QueuePass, serve_queue
from tests.core.large_pool import LargePool
from tests.core.plain_pass import PlainCapacity, plain_pass

STEPS = 90
ONE_NODE, SEVERAL_NODES = (24,), (12, 10, 8, 6)


def plainly(state: PoolState, now: float) -> QueuePass:
    plain = copy(state)
    plain.capacity = PlainCapacity(state)
    return plain_pass(plain, now)


def check_pass(state: PoolState, now: float) -> None:
    found, expected = serve_queue(state, now), plainly(state, now)
    is_whole_pass = now > state.settled_until or len(state.newcomers) > 1
    if not is_whole_pass and (state.reservation is not None or state.preemptible):
        return  # dates, and what leases leave soon, are looked at again only in the next whole pass
    if found.grants and not expected.grants:
        assert found.grants == [reclaim(state, now)], "a waiter is served that cannot be"
        return
    assert found.grants == expected.grants
    if is_whole_pass:
        assert found.victims == expected.victims
        assert (found.claims, found.spared) == (expected.claims, expected.spared)
        assert (found.reservation, found.undated) == (expected.reservation, expected.undated)
        assert (found.settled_until is None) == (expected.settled_until is None)
        # A pass that tries more may see more of what changes with time.
        assert (found.settled_until or inf) >= (expected.settled_until or inf)


def carry_out(pool: LargePool, command: cmd.Command) -> None:
    """One step, in which each pass over the queue is held against the plain one."""
    state, now = pool.state, pool.now
    for part in (cmd.Tick(), command):
        replay(state, decide(state, part, now))
    check_pass(state, now)
    while events := decide(state, cmd.ServeQueue(), now):
        replay(state, events)
        check_pass(state, now)


@pytest.mark.parametrize(
    ("nodes", "seed", "terms"),
    [
        (ONE_NODE, 1, {}),
        (ONE_NODE, 2, {"preempts": True}),
        (ONE_NODE, 3, {"workers_per_gpu": 2}),
        (ONE_NODE, 8, {"shares": 0.9, "reserve_after_s": 1e6}),
        (SEVERAL_NODES, 4, {}),
        (SEVERAL_NODES, 5, {"preempts": True}),
        (SEVERAL_NODES, 6, {"fair_share": True}),
        (SEVERAL_NODES, 7, {"awaits_reading_after_release": False}),
    ],
)
def test_decisions_are_those_of_the_plain_way(nodes: tuple[int, ...], seed: int, terms: dict[str, Any]) -> None:
    pool = LargePool(nodes, seed, **terms)
    for command in pool.opening():
        carry_out(pool, command)

    for _ in range(STEPS):
        carry_out(pool, pool.command())
