"""Leases run on live time, dates follow the wall clock, and neither depends on how often GPUs are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, ProcessId, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason, QueuedLease
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.ledger.driver import Driver, restored
from gpu_worker_pool.ledger.loop import LATE_S, TICK_S, LiveTime

from .memory import InlineWriter, MemoryJournal
from .virtual_loop import VirtualLoop, run

WALL = 1.7e9
GPU = Gpu(GpuKey("box", "GPU-0"), 0, "A100")
SHARE = Wishes(memory_mb=100.0)


class WallClock:
    """Is off by so much."""

    def __init__(self, off_s: float = 0.0) -> None:
        self.off_s = off_s

    def __call__(self) -> float:
        return WALL + self.off_s + asyncio.get_running_loop().time()


class Scene:
    def __init__(self, settings: PoolSettings, wall: WallClock, journal: MemoryJournal, boot_id: str) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.events: list[ev.Event] = []
        self.driver = Driver(settings, clock=loop.time)
        self.driver.listeners.append(self.events.extend)
        state, writer = restored(journal.load(100), settings), InlineWriter(journal)
        self.driver.lead(state, writer, boot_id=boot_id, wall_clock=wall, node="box")

    def look(self, utilization_percent: float = 0.0) -> None:
        reading = Reading(GPU, self.driver.now(), 80_000.0, 0.0, utilization_percent, processes=())
        self.driver.note(cmd.Observe((reading,)))

    async def keep_looking(self, every_s: float) -> None:
        while True:
            self.look()
            await asyncio.sleep(every_s)

    def ends(self) -> list[tuple[str, EndReason]]:
        return [(event.lease_id, event.reason) for event in self.events if isinstance(event, ev.LeaseEnded)]


@asynccontextmanager
async def scene(
    settings: PoolSettings | None = None,
    wall: WallClock | None = None,
    journal: MemoryJournal | None = None,
    boot_id: str = "boot",
) -> AsyncIterator[Scene]:
    made = Scene(settings or PoolSettings(), wall or WallClock(), journal or MemoryJournal(), boot_id)
    try:
        yield made
    finally:
        made.driver.close()


def remote(ttl_s: float, wishes: Wishes = SHARE) -> Request:
    return Request(wishes, ttl_s=ttl_s)


def local(wishes: Wishes = SHARE) -> Request:
    return Request(wishes, Holder(process=ProcessId(7, 1.0)))


def test_after_standing_still_nobody_has_lost_a_place_or_a_gpu() -> None:
    async def main() -> None:
        async with scene() as made:
            made.look()
            for name in ("holder", "waiter"):
                await made.driver.do(cmd.RequestLease(name, remote(30.0, Wishes())))
            made.loop.stand_still(1000.0)  # stopped, or the machine slept: no heartbeat could be read
            await asyncio.sleep(29.0)
            await made.driver.do(cmd.Renew(("waiter",)))
            assert isinstance(await made.driver.find("holder"), ActiveLease)
            assert isinstance(await made.driver.find("waiter"), QueuedLease)
            await asyncio.sleep(3.0)  # time counts again: a lease that is silent for its TTL has ended
            assert made.ends() == [("holder", EndReason.EXPIRED)]
            assert not any(isinstance(event, ev.TakenOver) for event in made.events[1:])

    run(main())


@pytest.mark.parametrize("away_s", [0.5, 3.0, 1000.0])
def test_a_heartbeat_that_waits_in_its_socket_saves_a_lease_that_had_little_time_left(away_s: float) -> None:
    async def main() -> None:
        async with scene() as made:
            made.look()
            await made.driver.do(cmd.RequestLease("held", remote(10.0)))
            await asyncio.sleep(9.9)
            made.loop.stand_still(away_s)
            await asyncio.sleep(0.0)
            for _ in range(10):  # it takes a while until it is read, in turns that are not long
                made.loop.stand_still(0.02)
                await asyncio.sleep(0.0)
            (renewed,) = await made.driver.do(cmd.Renew(("held",)))
            assert isinstance(renewed, ev.LeasesRenewed)
            await asyncio.sleep(9.5)
            assert made.ends() == []
            assert (made.driver.state.expires_at("held") or 0.0) - made.driver.now() == pytest.approx(0.5, abs=0.01)

    run(main())


@pytest.mark.parametrize("away_s", [0.3, TICK_S + LATE_S, 0.6, 1.2])
@pytest.mark.parametrize("phase_s", [0.0, 0.1, 0.24])
def test_a_standstill_of_any_length_costs_no_lease_of_a_second(away_s: float, phase_s: float) -> None:
    """Its heartbeats come every third of its TTL, and a standstill of up to half a second goes unnoticed."""

    async def main() -> None:
        async with scene() as made:
            made.look()
            await asyncio.sleep(phase_s)  # since the ticker rang
            await made.driver.do(cmd.RequestLease("held", remote(1.0)))
            await asyncio.sleep(1.0 / 3)
            made.loop.stand_still(away_s)
            await asyncio.sleep(0.1)  # until the heartbeat is read
            (renewed,) = await made.driver.do(cmd.Renew(("held",)))
            assert isinstance(renewed, ev.LeasesRenewed)

    run(main())


def test_a_loop_that_is_in_time_loses_nothing() -> None:
    lost: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        live = LiveTime(loop.time, lost.append, lambda: None)
        live.start()
        for _ in range(20):
            await asyncio.sleep(0.3)
            loop.stand_still(0.2)
            live.look()
        live.stop()

    run(main())
    assert lost == []


@pytest.mark.parametrize("refresh_s", [1.0, 5.0, 10.0])
def test_readings_that_come_seldom_are_kept_and_an_idle_gpu_is_taken_back(refresh_s: float) -> None:
    """With local leases only, nothing is due between two readings."""
    settings = PoolSettings(idle_after_s=20.0, idle_reclaim=True, preempt_grace_s=1.0, stale_after_s=3 * refresh_s + 15)

    async def main() -> float:
        async with scene(settings) as made:
            reads = asyncio.create_task(made.keep_looking(refresh_s))
            await asyncio.sleep(0.1)
            await made.driver.do(cmd.RequestLease("idle", local()))
            granted = made.driver.now()
            while not made.ends():
                await asyncio.sleep(0.1)
                assert made.driver.now() < granted + 60.0, "an idle GPU is not taken back"
                assert made.driver.state.slots[GPU.key].reading is not None
            reads.cancel()
            assert made.ends() == [("idle", EndReason.IDLE)]
            assert sum(isinstance(event, ev.TakenOver) for event in made.events) == 1
            return made.driver.now() - granted

    assert 20.0 <= run(main()) <= 20.0 + refresh_s + 2.0


def test_dates_follow_a_wall_clock_that_is_set_and_a_reboot_does_not_move_the_pools_clock() -> None:
    async def main() -> None:
        wall, journal = WallClock(-3600.0), MemoryJournal()
        async with scene(wall=wall, journal=journal) as before:
            before.look()
            await before.driver.do(cmd.RequestLease("early", remote(1000.0)))
            wall.off_s = 0.0  # NTP has set it
            await asyncio.sleep(2.0)
            await before.driver.do(cmd.RequestLease("late", Request(SHARE, ttl_s=1000.0, time_limit_s=600.0)))
            assert before.driver.state.wall_offset_s == pytest.approx(WALL, abs=0.01)
            late = await before.driver.find("late")
            assert isinstance(late, ActiveLease)
            assert late.granted_at == pytest.approx(WALL + before.driver.now())
            limit = late.limit
        await asyncio.sleep(60.0)
        async with scene(wall=wall, journal=journal, boot_id="another boot") as after:
            assert after.driver.now() == pytest.approx(before.driver.now(), abs=1.0)
            assert after.driver.state.wall_offset_s == pytest.approx(WALL, abs=0.01)
            lease = after.driver.state.leases["late"]
            assert isinstance(lease, ActiveLease)
            assert lease.limit == limit
            await asyncio.sleep(100.0)
            assert not isinstance(await after.driver.find("late"), EndedLease)

    run(main())


def test_a_wall_clock_that_drifts_a_little_is_left_alone() -> None:
    async def main() -> Sequence[ev.Event]:
        wall = WallClock()
        async with scene(wall=wall) as made:
            wall.off_s = 0.5
            await asyncio.sleep(5.0)
            return made.events

    assert not any(isinstance(event, ev.WallTimeSet) for event in run(main()))
