"""A pool that goes on from an old copy grants nothing that it may have granted since."""

from __future__ import annotations

from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.put_back import FENCES_AHEAD, put_back
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import START, Box, key, reading

READINGS = (reading(0), reading(1), reading(2))


def put_back_box(box: Box, *installed: str) -> Box:
    """The box, begun again with the history that a copy of its journal is put back with."""
    box.state = replay(PoolState(settings=box.settings), put_back(box.state, installed, "restored"))
    box.do(box.take_over())
    box.announce(box.state.nodes)
    box.observe_now(*READINGS)
    return box


def test_the_leases_and_the_order_of_the_queue_are_those_of_the_copy() -> None:
    box = Box(*READINGS)
    for lease_id, gpus in (("a", 2), ("b", 2), ("c", 1), ("d", 3)):
        box.ask(lease_id, gpus=gpus)
    before = {lease_id: box.stage(lease_id) for lease_id in "abcd"}

    put_back_box(box)

    assert {lease_id: box.stage(lease_id) for lease_id in "abcd"} == before
    assert (box.fence_of("a"), list(box.state.queue)) == (1, ["b", "d"])
    assert box.state.clock == START


def test_no_gpu_is_granted_before_an_operator_has_put_it_into_service() -> None:
    box = put_back_box(Box(reading(0), reading(1)), key(2).uuid)
    box.ask("new")

    assert (box.stage("new"), box.verdict(2).code) == ("queued", "excluded")
    box.do(cmd.IncludeGpu(key(2)))
    assert box.stage("new") == "active"


def test_a_gpu_that_was_out_of_service_keeps_its_reason() -> None:
    box = Box(*READINGS)
    box.do(cmd.ExcludeGpu(key(0), "its fan is broken"))

    put_back_box(box)

    assert [box.state.excluded[key(index)] for index in range(3)] == ["its fan is broken", "restored", "restored"]


def test_fences_are_above_all_that_were_given_since_the_copy() -> None:
    box = Box(*READINGS)
    box.ask("a")
    put_back_box(put_back_box(box))
    for index in range(3):
        box.do(cmd.IncludeGpu(key(index)))

    box.ask("new")

    assert box.fence_of("new") == 2 * FENCES_AHEAD + 2
