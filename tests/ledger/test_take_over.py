"""A driver takes charge of what another left: after a restart, a reboot, or on another machine; and leads again after it followed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, InventoryGpu, ProcessId, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason
from gpu_worker_pool.core.model.request import Holder, Request
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.ledger.driver import TURN_S, Driver, restored

from .memory import InlineWriter, MemoryJournal

WALL = 1.7e9
GPU = Gpu(GpuKey("box", "GPU-0"), 0, "A100")


def opened(
    journal: MemoryJournal, boot_s: float, wall_now: float, *, boot_id: str = "boot", node: str = "box", epoch: int = 0
) -> Driver:
    driver = Driver(PoolSettings(), clock=lambda: boot_s)
    state, writer = restored(journal.load(10), driver.state.settings), InlineWriter(journal)
    driver.lead(state, writer, boot_id=boot_id, wall_clock=lambda: wall_now, node=node, epoch=epoch)
    return driver


async def held() -> MemoryJournal:
    """A journal in which a local and a remote holder had each a share of one GPU, at 100 s of its clock."""
    journal = MemoryJournal()
    driver = opened(journal, 100.0, WALL)
    driver.note(cmd.Observe((Reading(GPU, 100.0, 80_000.0, 0.0, 0.0, processes=()),)))
    wishes = replace(Request().wishes, memory_mb=100)
    local = Request(wishes, Holder(process=ProcessId(7, 1.0), node="box"))
    await driver.do(cmd.RequestLease("local", local))
    await driver.do(cmd.RequestLease("remote", Request(wishes, ttl_s=30.0, time_limit_s=1000.0)))
    return journal


async def test_after_a_reboot_the_clock_goes_on_and_local_holders_have_ended() -> None:
    driver = opened(await held(), 5.0, WALL + 60.0, boot_id="another boot")

    assert driver.now() == 160.0
    assert driver.clock_base == 155.0
    assert driver.state.wall_offset_s == WALL - 100.0
    assert driver.state.ended["local"].reason is EndReason.HOLDER_DIED
    remote = driver.state.leases["remote"]
    assert isinstance(remote, ActiveLease)
    assert remote.limit == 1100.0
    assert driver.state.ttl_due.due_at("remote") == 190.0


async def test_on_the_same_boot_the_clock_is_the_same_though_the_wall_clock_was_set() -> None:
    driver = opened(await held(), 130.0, WALL + 1e6)

    assert driver.now() == 130.0
    assert driver.state.wall_offset_s == WALL + 1e6 - 130.0
    assert isinstance(driver.state.leases["local"], ActiveLease)


async def test_another_machine_of_the_fleet_takes_over_and_no_lease_ends() -> None:
    driver = opened(await held(), 9e6, WALL + 3.0, boot_id="its boot", node="other", epoch=2)

    assert driver.now() == 103.0
    assert set(driver.state.leases) == {"local", "remote"}
    assert set(driver.state.nodes) == {"box", "other"}


async def test_only_processes_of_this_node_are_looked_for() -> None:
    looked_for: list[ProcessId] = []

    def is_alive(process: ProcessId) -> bool:
        looked_for.append(process)
        return True

    driver = Driver(PoolSettings(), clock=lambda: 100.0, is_alive=is_alive)
    driver.lead(driver.state, InlineWriter(MemoryJournal()), boot_id="boot", wall_clock=lambda: WALL, node="box")
    driver.note(cmd.Observe((Reading(GPU, 100.0, 80_000.0, 0.0, 0.0, processes=()),)))
    wishes = replace(Request().wishes, memory_mb=100)
    for pid, node in enumerate(("box", "other", None)):
        await driver.do(cmd.RequestLease(str(pid), Request(wishes, Holder(process=ProcessId(pid, 1.0), node=node))))

    assert looked_for == [ProcessId(0, 1.0), ProcessId(2, 1.0)]


async def test_what_many_boxes_say_waits_for_a_turn_that_has_time_and_is_carried_out_in_order() -> None:
    times, worked = [100.0], count(step=TURN_S)
    driver = Driver(PoolSettings(), clock=lambda: times[-1], work_clock=lambda: next(worked))
    driver.lead(
        driver.state, InlineWriter(MemoryJournal()), boot_id="boot", wall_clock=lambda: WALL, node="box", epoch=1
    )
    times.append(110.0)
    gpus = [Gpu(GpuKey(node, "GPU-1"), 0, "A100") for node in ("a", "b", "c")]
    for gpu in gpus:
        installed = InventoryGpu(gpu.key.uuid, gpu.index, gpu.name, 80_000.0)
        driver.note(cmd.AnnounceNode(gpu.key.node, "boot", (installed,)))
    for gpu in gpus:
        driver.note(observed(gpu, at=101.0))

    def read() -> set[str]:
        return {key.node for key, slot in driver.state.slots.items() if slot.reading is not None}

    assert not read()  # the announcements took the whole turn
    driver.note(cmd.SilenceNode("b"))
    driver.note(cmd.AnnounceNode("b", "boot"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert read() == {"a", "c"}


def observed(*gpus: Gpu, at: float) -> cmd.Observe:
    return cmd.Observe(tuple(Reading(gpu, at, 80_000.0, 0.0, 0.0, processes=()) for gpu in gpus))


async def test_the_time_in_which_it_followed_is_not_a_standstill(caplog: pytest.LogCaptureFixture) -> None:
    now, writer = [100.0], InlineWriter(MemoryJournal())
    driver = Driver(PoolSettings(), clock=lambda: now[0])
    driver.lead(driver.state, writer, boot_id="boot", wall_clock=lambda: 1.7e9, epoch=1, node="box")
    await driver.do(cmd.RequestLease("waits", Request()))
    driver.step_down("another one leads")
    now[0] += 3600.0

    driver.lead(driver.state, writer, boot_id="boot", wall_clock=lambda: 1.7e9 + 3600.0, epoch=2, node="box")

    assert "took no heartbeat" not in caplog.text
    driver.close()
