"""Another driver takes over: nobody loses a lease, time goes on, and nothing is granted on what is not known again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.clock import clock_base
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import InventoryGpu
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import A100, START, T4, WALL_OFFSET_S, Box, key, of_kind, process, reading, refusals, request


def taken_over(box: Box) -> Box:
    """By a driver on another machine, two seconds later. No node has announced itself yet."""
    box.now += 2.0
    box.do(cmd.TakeOver(2, "boot of another machine", -5000.0, WALL_OFFSET_S))
    return box


def on_node(asked: Request, node: str) -> Request:
    return replace(asked, holder=replace(asked.holder, node=node))


def two_nodes(*names: str) -> Box:
    return Box(
        reading(node="x", name=names[0] if names else A100), reading(node="y", name=names[-1] if names else A100)
    )


# --- take-over -----------------------------------------------------------------------------------------------------


def test_a_take_over_by_another_machine_ends_nobody() -> None:
    box = Box(reading(0), reading(1))
    box.ask("local", pid=7)
    box.ask("remote", ttl_s=30)
    box.ask("waits", gpus=2, pid=8)
    box.now += 29.0

    taken_over(box)
    box.announce(["box"])

    assert [box.stage(name) for name in ("local", "remote", "waits")] == ["active", "active", "queued"]
    # The box that has its GPU counts its TTL.
    assert box.expires_in_s("remote") is None


def test_a_node_that_has_not_announced_itself_is_granted_nothing() -> None:
    box = taken_over(Box(reading()))
    box.ask("a")

    step(box.state, cmd.Observe((reading(at=box.now),)), box.now)
    assert box.stage("a") == "queued"

    box.observe_now(reading())
    assert box.stage("a") == "active"


def test_a_reading_that_began_before_the_take_over_is_void() -> None:
    box = taken_over(Box(reading()))
    box.ask("a")
    box.announce(["box"])

    box.observe(reading(at=box.now - 0.1))
    assert box.stage("a") == "queued"

    box.observe(reading(at=box.now))
    assert box.stage("a") == "active"


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


# --- the nodes -----------------------------------------------------------------------------------------------------


def test_a_reboot_ends_only_the_leases_whose_holder_ran_there() -> None:
    box = two_nodes()
    for name, node in (("on x", "x"), ("on y", "y")):
        box.do(cmd.RequestLease(name, on_node(request(worker=name, pid=7, among=(f"GPU-{node}-0",)), node)))

    box.do(cmd.AnnounceNode("x", "its next boot"))

    assert (box.stage("on x"), box.stage("on y")) == ("holder_died", "active")


def test_a_holder_that_dies_with_its_node_leaves_processes_on_another() -> None:
    box = two_nodes()
    box.do(cmd.RequestLease("a", on_node(request(pid=7, among=("GPU-y-0",)), "x")))

    box.do(cmd.AnnounceNode("x", "its next boot"))

    assert box.stage("a") == "draining"


def test_a_reboot_ends_only_the_draining_of_that_node() -> None:
    box = two_nodes()
    for name in ("x", "y"):
        box.ask(name, among=(f"GPU-{name}-0",))
        box.release(name)

    box.do(cmd.AnnounceNode("x", "its next boot"))

    assert (box.stage("x"), box.stage("y")) == ("released", "draining")


def test_a_rebooted_node_is_granted_nothing_before_a_new_reading() -> None:
    box = Box(reading())
    box.do(cmd.AnnounceNode("box", "its next boot"))

    box.ask("a")

    assert box.stage("a") == "queued"


def test_a_remote_holder_of_a_rebooted_node_has_a_full_ttl() -> None:
    box = Box(reading())
    box.ask("a", ttl_s=30)
    box.pass_time(29.0)

    box.do(cmd.AnnounceNode("box", "its next boot"))

    assert box.expires_in_s("a") == 30


def test_the_same_pid_on_another_node_is_another_process() -> None:
    """It must not be granted the GPU on which the first one has left memory."""
    box = two_nodes()
    box.do(cmd.RequestLease("a", on_node(request(worker="a", pid=7, among=("GPU-x-0",)), "x")))
    box.observe_now(reading(node="x", used_mb=9_000, processes=(process(7, 9_000),)))
    box.release("a")
    box.observe_now(reading(node="x", used_mb=9_000, processes=(process(7, 9_000),)))

    box.do(cmd.RequestLease("b", on_node(request(worker="b", pid=7, among=("GPU-x-0",)), "y")))
    assert box.stage("b") == "queued"

    box.do(cmd.RequestLease("c", on_node(request(worker="c", pid=7, among=("GPU-x-0",)), "x")))
    assert box.stage("c") == "queued", "behind b"
    box.release("b")
    assert box.stage("c") == "active"


def test_memory_of_the_same_pid_on_another_node_is_not_the_leases() -> None:
    box = Box(reading(node="x"))
    box.do(cmd.RequestLease("a", on_node(request(pid=7), "y")))

    box.observe_now(reading(node="x", used_mb=9_000, processes=(process(7, 9_000),)))

    assert not box.state.slots[key(node="x")].members


def test_a_holder_whose_process_is_on_another_node_has_a_ttl() -> None:
    box = two_nodes()
    for name, node in (("near", "x"), ("far", "y")):
        box.do(cmd.RequestLease(name, on_node(request(worker=name, pid=7, memory_mb=9, among=("GPU-x-0",)), node)))

    assert box.expires_in_s("near") is None
    assert box.expires_in_s("far") == 600_000.0


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
