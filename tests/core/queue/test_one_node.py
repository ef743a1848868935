"""A request for the GPUs of one node concerns that node, and no other."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.queue.explain import explain
from gpu_worker_pool.core.queue.placement import Placer
from gpu_worker_pool.core.queue.refusal import why_unservable
from tests.core.build import Box, reading
from tests.core.queue.test_many_waiters import calls
from tests.core.queue.test_reservation_properties import Job, Play, box_of, jobs

NODES = (3, 3)


def test_it_gets_gpus_of_that_node_only() -> None:
    box = box_of(2, 2)
    for number in range(3):
        box.ask(f"job{number}", node="node1")

    assert [box.stage(f"job{number}") for number in range(3)] == ["active", "active", "queued"]
    assert {gpu.node for number in range(2) for gpu in box.gpus_of(f"job{number}")} == {"node1"}
    found = explain(box.state, "job2", box.now)
    assert found is not None
    assert {item.key.node for item in found.verdicts} == {"node1"}
    assert str(found).startswith("Position 1 of 1, waiting for 1 GPU on node1: 2 leased by")


def test_what_the_node_can_never_serve_is_refused() -> None:
    box = box_of(1, 4)
    asked = Wishes(gpus=2, node="node0")
    assert why_unservable(box.state, asked) == "2 GPUs on node0 were asked for; this box has 1 GPU"
    assert why_unservable(box.state, Wishes(gpus=2, node="node1")) is None
    assert why_unservable(box.state, Wishes(gpus=9, node="not joined yet")) is None
    with pytest.raises(ValueError, match="ask for one of the two"):
        Wishes(nodes=2, node="node0")


def test_in_a_pool_of_many_nodes_it_costs_what_it_costs_on_one() -> None:
    """What it costs is counted in calls and not in time."""
    costs: list[int] = []
    # The first time, answers that are kept are not there yet.
    for nodes in (1, 1, 300):
        box = Box(
            *(reading(index, node=f"node{node}") for node in range(nodes) for index in range(2)), stale_after_s=1e9
        )
        for number in range(2):
            box.ask(f"holds{number}", node="node0")
        found = calls(partial(box.ask, "waits", gpus=2, node="node0"))
        costs.append(found.total() + calls(partial(box.ask, "waits too", node="node0")).total())
    assert costs[1] == costs[2]


@settings(max_examples=60, deadline=None)
@given(jobs(0, 0, 1), st.lists(st.sampled_from(["node0", "node1", None]), min_size=30, max_size=30))
def test_what_is_reserved_on_one_node_keeps_nothing_on_another(load: list[Job], places: list[str | None]) -> None:
    play = Play(box_of(*NODES, reserve_after_s=0.0), *NODES)
    for number, job in enumerate(load):
        play.jobs[f"job{number}"] = job
        play.box.ask(
            f"job{number}", gpus=job.gpus, priority=job.priority, time_limit_s=job.limit_s, node=places[number]
        )
        play._note_events()
        state = play.box.state
        reserved = state.reservation.nodes if state.reservation else frozenset()
        for lease_id in state.queue:
            wishes = state.queued(lease_id).request.wishes
            if wishes.node is not None and wishes.node not in reserved:
                assert Placer(state, play.box.now).place(wishes) is None, (
                    "it waits for what nobody has and nobody awaits"
                )
        play.run_to(play.box.now + job.gap_s)
    play.run_to(play.box.now + 1e6)
    assert not len(play.box.state.queue), "it starves"
