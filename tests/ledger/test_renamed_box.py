"""A box that was renamed has the same GPUs: its journal is read as that of a box with the present name."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_worker_pool.core.decider.condense import condense, put_back
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from tests.core.build import WALL_OFFSET_S, Box, key, process, reading, request
from tests.ledger.examples import ENDED


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


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


def renamed(box: Box, path: Path, name: str = "new") -> Box:
    """The box, begun again under this name with what a journal has of it."""
    with closing(SqliteJournal(path)) as journal:
        journal.compact([event for event in box.log if isinstance(event, ev.DurableEvent)])
    with closing(SqliteJournal(path, node=name)) as journal:
        box.log = [*journal.load(0).events]
    box.restart()
    return box


def there(index: int, node: str = "new") -> GpuKey:
    return GpuKey(node, key(index).uuid)


def test_everything_goes_with_the_box(path: Path) -> None:
    box = lived_in()
    before = box.gpus_of("held")
    fence = box.state.fences["box"]
    state = renamed(box, path).state

    for pool in (state, replay(PoolState(), condense(state))):
        lease = pool.leases["held"]
        assert isinstance(lease, ActiveLease)
        assert lease.gpus == tuple(GpuKey("new", gpu.uuid) for gpu in before)
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


def test_a_journal_with_several_names_is_that_of_one_box(path: Path) -> None:
    box = renamed(lived_in(), path)
    box.log = [*condense(box.state)]
    box.observe_now(*(replace(reading(index), gpu=replace(reading(index).gpu, key=there(index))) for index in range(5)))
    fence = box.state.fences["new"]

    renamed(box, path, "newer")

    assert (list(box.state.nodes), box.state.fences) == (["newer"], {"newer": fence})
    assert {slot for slot in box.state.slots if slot.node == "newer"} == {there(index, "newer") for index in range(5)}
    assert {slot.node for slot in box.state.slots} == {"newer"}


def test_fences_do_not_go_back_and_leases_go_on(path: Path) -> None:
    box = lived_in()
    fence = box.state.fences["box"]
    renamed(box, path)
    box.release("waits")
    box.ask("next")

    box.observe_now(*(replace(reading(index), gpu=replace(reading(index).gpu, key=there(index))) for index in range(4)))

    assert box.fence_of("next") == fence + 1
    assert box.stage("held") == "active"


def test_gpus_that_a_copy_does_not_know_are_out_of_service_on_a_box_with_another_name(path: Path) -> None:
    box = Box(reading(0))
    box.ask("held")
    box.ask("waits")
    box.log = [*put_back(box.state, "restored")]

    renamed(box, path, "other").observe_now(*(reading(index, node="other") for index in range(3)))

    assert (box.stage("held"), box.stage("waits")) == ("active", "queued")
    assert set(box.state.excluded) == {there(0, "other"), *(key(index, "other") for index in range(3))}


def test_an_ended_lease_keeps_the_name_it_had(path: Path) -> None:
    with closing(SqliteJournal(path, node="new")) as journal:
        journal.append((), [ENDED])
        assert journal.load(1).ended == (ENDED,)
