"""Another driver takes over: nobody loses a lease, time goes on, and nothing is granted on what is not known again."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.leadership import clock_base
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import InventoryGpu
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import A100, START, T4, WALL_OFFSET_S, Box, key, of_kind, reading, refusals


def taken_over(box: Box) -> Box:
    """By a driver on another machine, two seconds later. No node has announced itself yet."""
    box.now += 2.0
    box.do(cmd.TakeOver(2, "boot of another machine", -5000.0, WALL_OFFSET_S))
    return box


def two_nodes(*names: str) -> Box:
    return Box(
        reading(node="x", name=names[0] if names else A100), reading(node="y", name=names[-1] if names else A100)
    )


# --- take-over -----------------------------------------------------------------------------------------------------


def test_a_late_driver_does_not_set_the_clock_back() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)

    box.do(cmd.TakeOver(0, "boot2", 0.0, WALL_OFFSET_S))
    step(box.state, cmd.TakeOver(0, "boot3", 0.0, WALL_OFFSET_S), 5.0)

    assert box.state.clock == START
    assert box.expires_in_s("a") == 30


@pytest.mark.parametrize(
    ("boot_id", "boot_now", "wall_now", "now"),
    [
        pytest.param("boot1", 130.0, 9e9, 130.0, id="the same boot keeps its base, whatever the wall clock says"),
        pytest.param("boot2", 3.0, WALL_OFFSET_S + START + 600.0, START + 600.0, id="ten minutes later"),
        pytest.param("boot2", 9e6, WALL_OFFSET_S + START + 600.0, START + 600.0, id="a machine that runs for longer"),
        pytest.param("boot2", 3.0, WALL_OFFSET_S - 1e6, START, id="a wall clock that was set back"),
    ],
)
def test_the_pools_clock_goes_on(boot_id: str, boot_now: float, wall_now: float, now: float) -> None:
    state = Box(reading()).state

    assert clock_base(state, boot_id=boot_id, boot_now=boot_now, wall_now=wall_now) + boot_now == now


def test_a_new_pool_begins_with_the_clock_of_its_driver() -> None:
    assert clock_base(PoolState(), boot_id="boot", boot_now=77.0, wall_now=1.7e9) == 0.0


# --- the inventory -------------------------------------------------------------------------------------------------


def test_what_a_node_that_is_away_could_serve_is_not_refused() -> None:
    box = taken_over(two_nodes(A100, T4))
    box.observe_now(reading(node="y", name=T4))

    box.ask("a", model="A100")
    refused = box.ask("b", model="H100")

    assert box.stage("a") == "queued"
    assert refusals(refused, ev.RefusalCode.UNSERVABLE)


def test_what_no_node_could_serve_is_refused_before_the_first_reading() -> None:
    box = taken_over(Box(reading()))

    (refused,) = refusals(box.ask("a", gpus=2), ev.RefusalCode.UNSERVABLE)

    assert refused.why == "2 GPUs on one node were asked for; this box has 1 GPU"


def test_nobody_is_refused_while_the_gpus_of_a_node_are_unknown() -> None:
    box = Box(reading())
    box.announce(["new"])

    box.ask("a", model="H100")

    assert box.stage("a") == "queued"


def test_the_inventory_follows_the_readings() -> None:
    box = Box(reading(0, name=T4, total_mb=None))
    box.observe_now(reading(0, total_mb=80_000), reading(1))
    assert not of_kind(box.observe_now(reading(0, total_mb=None), reading(1)), ev.NodeJoined)

    known = tuple(InventoryGpu(f"GPU-box-{index}", index, A100, 80_000) for index in range(2))
    assert box.state.nodes["box"].gpus == known


def test_a_gpu_that_is_no_longer_announced_is_forgotten() -> None:
    box = Box(reading(0), reading(1))

    box.do(cmd.AnnounceNode("box", "boot1", (InventoryGpu("GPU-box-0", 0, A100, 80_000),)))

    assert list(box.state.slots) == [key(0)]
    assert refusals(box.ask("a", gpus=2), ev.RefusalCode.UNSERVABLE)
