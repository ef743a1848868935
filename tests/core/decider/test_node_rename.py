"""A box that is renamed has the same GPUs."""

from __future__ import annotations

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.node_rename import ended_on_node, event_on_node
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import Box, key, process, reading


def lived_in() -> Box:
    box = Box(*(reading(index) for index in range(4)))
    for name in ("held", "left", "gone"):
        box.ask(name, pid=len(name))
    box.observe_now(*(reading(index, used_mb=16_000, processes=(process(4, 16_000),)) for index in range(4)))
    box.release("left")
    box.release("gone")
    box.ask("waits", gpus=4)
    return box


def test_leases_and_fences_go_with_the_box() -> None:
    box = lived_in()
    for history in ([event for event in box.log if isinstance(event, ev.DurableEvent)], condense(box.state)):
        moved = replay(PoolState(), [event_on_node("renamed", event) for event in history])
        lease = moved.leases["held"]
        assert isinstance(lease, ActiveLease)
        assert [gpu.node for gpu in lease.gpus] == ["renamed"]
        assert {gpu.uuid for gpu in lease.gpus} == {gpu.uuid for gpu in box.gpus_of("held")}
        assert moved.fences == {"renamed": box.state.fences["box"]}
        assert {slot.node for slot in moved.slots} == {"renamed"}
        assert list(moved.queue) == ["waits"]


def test_what_an_operator_took_out_of_service_stays_so() -> None:
    moved = replay(PoolState(), [event_on_node("renamed", ev.GpuExcluded(1.0, key(2), "bad fan"))])
    assert moved.excluded == {key(2)._replace(node="renamed"): "bad fan"}


def test_an_ended_lease_is_remembered_where_the_box_is_now() -> None:
    box = lived_in()
    draining = box.state.leases["gone"]
    assert isinstance(draining, DrainingLease)
    assert {gpu.node for gpu in ended_on_node("renamed", draining.ended).gpus} == {"renamed"}


def test_under_the_same_name_nothing_changes() -> None:
    box = lived_in()
    assert [event_on_node("box", event) for event in condense(box.state)] == condense(box.state)
