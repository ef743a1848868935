"""A box that is renamed has the same GPUs."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import WALL_OFFSET_S, Box, key, process, reading, request


def lived_in() -> Box:
    box = Box(*(reading(index) for index in range(4)))
    for name in ("held", "left", "gone"):
        asked = request(worker=name, pid=len(name))
        box.do(cmd.RequestLease(name, replace(asked, holder=replace(asked.holder, node="box"))))
    box.observe_now(*(reading(index, used_mb=16_000, processes=(process(4, 16_000),)) for index in range(4)))
    box.release("left")
    box.release("gone")
    box.ask("waits", gpus=4)
    box.exclude(key(3), "bad fan")
    course = Booking("course", (key(2),), WALL_OFFSET_S + 1e5, WALL_OFFSET_S + 2e5, "ada", "course")
    box.do(cmd.BookGpus(course, Wishes()))
    return box


def renamed(box: Box) -> Box:
    box.do(cmd.RenameNode("box", "new"))
    return box


def there(index: int) -> GpuKey:
    return key(index)._replace(node="new")


def test_everything_goes_with_the_box() -> None:
    box = lived_in()
    before = box.gpus_of("held")
    fence = box.state.fences["box"]
    state = renamed(box).state

    for pool in (state, replay(PoolState(), condense(state))):
        lease = pool.leases["held"]
        assert isinstance(lease, ActiveLease)
        assert lease.gpus == tuple(gpu._replace(node="new") for gpu in before)
        assert lease.request.holder.node == "new"
        draining = [lease for lease in pool.leases.values() if isinstance(lease, EndedLease)]
        assert {gpu.node for lease in draining for gpu in lease.draining} == {"new"}
        assert pool.fences == {"new": fence}
        assert {slot.node for slot in pool.slots} == {"new"}
        assert pool.slots[lease.gpus[0]].occupants.keys() == {"held"}
        assert list(pool.queue) == ["waits"]
        assert pool.excluded == {there(3): "bad fan"}
        assert pool.bookings["course"].gpus == (there(2),)
        assert list(pool.nodes) == ["new"]


def test_a_restart_knows_the_new_name() -> None:
    box = renamed(lived_in())
    before = dict(box.state.leases)

    box.restart()

    assert box.state.leases == before
    assert {slot.node for slot in box.state.slots} == {"new"}


def test_fences_do_not_go_back_and_leases_go_on() -> None:
    box = lived_in()
    fence = box.state.fences["box"]
    renamed(box)
    box.release("waits")
    box.ask("next")

    read = [replace(reading(index), gpu=replace(reading(index).gpu, key=there(index))) for index in range(4)]
    box.observe_now(*read)

    assert box.fence_of("next") == fence + 1
    assert box.stage("held") == "active"


def test_an_ended_lease_keeps_the_name_it_had() -> None:
    box = Box(reading(), awaits_reading_after_release=False)
    box.ask("a")
    box.release("a")

    renamed(box)

    assert box.state.ended["a"].gpus == (key(),)


def test_a_name_that_is_not_known_or_taken_changes_nothing() -> None:
    box = Box(reading(node="x"), reading(node="y"))

    assert not box.do(cmd.RenameNode("z", "new"))
    assert not [event for event in box.do(cmd.RenameNode("x", "y")) if isinstance(event, ev.NodeRenamed)]
