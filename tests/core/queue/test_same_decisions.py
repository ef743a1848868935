"""The core decides as if it judged every GPU for every waiter (see plain_pass.py)."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.serve import QueuePass, serve_queue
from tests.core.large_pool import LargePool
from tests.core.plain_pass import plain_pass

STEPS = 90
ONE_NODE, SEVERAL_NODES = (24,), (12, 10, 8, 6)


def check_pass(state: PoolState, now: float, command: cmd.Command | None = None) -> None:
    found, expected = serve_queue(state, now), plain_pass(state, now)
    check_same(found, expected)
    if isinstance(command, cmd.RequestLease) and state.is_settled_at(now):
        newcomer = QueuedLease(command.lease_id, command.request, state.next_seq, now + state.wall_offset_s)
        queued = ev.LeaseQueued(now, newcomer.id, newcomer.request, newcomer.seq, newcomer.requested_at)
        with_it = replay(pickle.loads(pickle.dumps(state)), [queued])  # noqa: S301 - our own bytes
        check_same(serve_queue(state, now, newcomer=newcomer), plain_pass(with_it, now))


def check_same(found: QueuePass, expected: QueuePass) -> None:
    assert found.grant == expected.grant
    assert (found.victims, found.claims, found.spared) == (expected.victims, expected.claims, expected.spared)
    assert found.reservation == expected.reservation
    assert (found.settled_until is None) == (expected.settled_until is None)


def carry_out(pool: LargePool, command: cmd.Command) -> None:
    """One step, in which each pass over the queue is held against the plain one."""
    state, now = pool.state, pool.now
    replay(state, decide(state, cmd.Tick(), now))
    check_pass(state, now, command)
    replay(state, decide(state, command, now))
    check_pass(state, now)
    while events := decide(state, cmd.ServeQueue(), now):
        replay(state, events)
        check_pass(state, now)


@pytest.mark.parametrize(
    ("nodes", "seed", "terms"),
    [
        (ONE_NODE, 1, {}),
        (ONE_NODE, 2, {"preempts": True}),
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
