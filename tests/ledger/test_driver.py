"""The driver: nobody is told anything before it is written, whatever the journal does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, ProcessId, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason, QueuedLease
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.ledger.driver import TURN_S, Driver, restored
from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError, NotWritten
from gpu_worker_pool.ledger.outbox import SHORTEST_TO_COMPACT, Done, WriteBatch, WriterThread

from .memory import InlineWriter, MemoryJournal

SOON_S = 20.0


class SlowWriter:
    """Writes a batch when the test says so; it sits where the disk would be."""

    def __init__(self, journal: MemoryJournal) -> None:
        self.journal = journal
        self.orders: list[tuple[WriteBatch, Done]] = []
        self.batches = 0
        self.has_order = asyncio.Event()

    def write(self, batch: WriteBatch, done: Done) -> None:
        self.batches += 1
        self.orders.append((batch, done))
        self.has_order.set()

    async def next_order(self) -> None:
        async with asyncio.timeout(SOON_S):
            await self.has_order.wait()

    def finish(self, error: JournalError | None = None) -> None:
        batch, done = self.orders.pop(0)
        self.has_order.clear()
        if error is None:
            InlineWriter(self.journal).write(batch, done)
        else:
            done(batch, error)

    def is_compaction_due(self, live: int) -> bool:
        return False

    def close(self) -> None:
        self.journal.close()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Work:
    """The processor time of a thread that works hard: whenever it is asked for, more has gone by."""

    def __init__(self, each_s: float) -> None:
        self.each_s, self.worked_s = each_s, 0.0

    def __call__(self) -> float:
        self.worked_s += self.each_s
        return self.worked_s


def look(count: int = 1, at: float = 100.0) -> cmd.Observe:
    gpus = [Gpu(GpuKey("box", f"GPU-{index}"), index, "A100") for index in range(count)]
    return cmd.Observe(tuple(Reading(gpu, at, 80_000.0, 0.0, 0.0, processes=()) for gpu in gpus))


def ask(lease_id: str, pid: int | None = None, ttl_s: float = 1000.0) -> cmd.RequestLease:
    holder = Holder(process=None if pid is None else ProcessId(pid, 1.0))
    return cmd.RequestLease(lease_id, Request(holder=holder, ttl_s=ttl_s))


async def turns(count: int = 5) -> None:
    """Let everything that can go on go on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def opened(writer: Any = None, gpus: int = 1, **options: Any) -> Driver:
    journal = MemoryJournal()
    driver = Driver(PoolSettings(), clock=options.pop("clock", Clock()), **options)
    driver.lead(driver.state, writer or InlineWriter(journal), boot_id="boot", wall_clock=lambda: 0.0, node="box")
    driver.note(look(gpus))
    await turns()
    if isinstance(writer, SlowWriter):
        writer.finish()  # the opening itself
        await turns()
    return driver


def kinds(events: Sequence[ev.Event]) -> list[str]:
    return [type(event).__name__ for event in events if isinstance(event, ev.DurableEvent)]


async def test_a_request_is_answered_when_it_is_written_and_not_before() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer)
    answer = asyncio.ensure_future(driver.do(ask("a")))
    shown = asyncio.ensure_future(driver.find("a"))
    await turns()
    assert not answer.done()
    assert not shown.done(), "a grant was shown that is not written"
    writer.finish()
    assert kinds(await answer) == ["LeaseGranted"]
    assert isinstance(await shown, ActiveLease)
    assert kinds(writer.journal.load(1).events)[-2:] == ["NodeJoined", "LeaseGranted"]


async def test_somebody_who_waits_is_told_when_the_grant_is_written_and_not_before() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer)
    first = [asyncio.ensure_future(driver.do(ask(name))) for name in ("a", "b")]
    await turns()
    writer.finish()
    await asyncio.gather(*first)
    waiting = asyncio.ensure_future(driver.wait_while_queued("b", SOON_S))
    await turns()
    driver.note(cmd.Release("a"))
    driver.note(look(at=101.0))
    await turns()
    assert isinstance(driver.state.leases["b"], ActiveLease)
    assert not waiting.done()
    writer.finish()
    await waiting


async def test_all_who_ask_while_the_disk_is_busy_share_one_commit() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer, gpus=64)
    before = writer.batches
    answers = [asyncio.ensure_future(driver.do(ask("first")))]
    await turns()
    answers += [asyncio.ensure_future(driver.do(ask(f"lease{number}"))) for number in range(50)]
    await turns(20)  # one turn takes in only some of them
    writer.finish()
    await turns()
    writer.finish()
    await asyncio.gather(*answers)
    assert writer.batches - before == 2


async def test_an_end_and_the_grant_to_the_next_waiter_share_a_commit() -> None:
    """While writes are held, nothing is written and nobody is told; the waiter hears of it before the last holder."""
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer)
    driver.note(ask("first"))
    driver.note(ask("next"))
    await turns()
    writer.finish()
    before, told = writer.batches, []
    driver.early_listeners.append(lambda _: driver.outbox.hold(SOON_S))
    for name, work in (
        ("released", driver.do(cmd.Release("first"))),
        ("granted", driver.wait_while_queued("next", SOON_S)),
    ):
        asyncio.ensure_future(work).add_done_callback(lambda _, name=name: told.append(name))  # type: ignore[misc]
    await turns()
    assert writer.batches == before
    driver.note(look(at=100.0))
    driver.outbox.let_go()
    await turns()
    assert writer.batches == before + 1
    assert told == []
    writer.finish()
    await turns()
    assert told == ["granted", "released"]
    assert isinstance(await driver.find("next"), ActiveLease)


async def test_writes_are_held_no_longer_than_agreed() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer)
    driver.early_listeners.append(lambda _: driver.outbox.hold(0.001))
    answer = asyncio.ensure_future(driver.do(ask("a")))
    await writer.next_order()
    writer.finish()
    assert kinds(await answer) == ["LeaseGranted"]


async def test_a_full_disk_grants_nothing_and_costs_nobody_his_lease() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer, gpus=2)
    held = asyncio.ensure_future(driver.do(ask("held")))
    await turns()
    writer.finish()
    await held
    answer = asyncio.ensure_future(driver.do(ask("a")))
    await turns()
    writer.finish(JournalError("the disk is full"))
    with pytest.raises(NotWritten, match="the disk is full"):
        await answer
    for command in (ask("b"), cmd.Release("held"), cmd.EndLease("held", EndReason.REVOKED)):
        with pytest.raises(NotWritten, match="the disk is full"):
            await driver.do(command)
    with pytest.raises(NotWritten):
        await driver.find("a")
    assert not driver.outbox.is_written("a")
    assert await driver.do(cmd.Renew(("held",))) == [ev.LeasesRenewed(100.0, ("held",))]
    assert isinstance(await driver.find("held"), ActiveLease)
    assert kinds(writer.journal.load(1).events) == [
        "TakenOver",
        "NodeJoined",
        "NodeJoined",
        "LeaseGranted",
    ]


async def test_on_a_full_disk_a_holder_is_not_lost_because_what_was_seen_of_it_is_not_written() -> None:
    """A look at the GPUs may be what fills the disk: it finds the process of the holder on its GPU."""
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer)
    driver.note(ask("held", pid=7))
    await turns()
    writer.finish()
    (idle,) = look(at=101.0).readings
    driver.note(cmd.Observe((replace(idle, processes=(GpuProcess(ProcessId(7, 1.0), 100.0),)),)))
    await turns()
    assert kinds(writer.orders[0][0].events) == ["ProcessesAttributed"]
    writer.finish(JournalError("the disk is full"))
    renewed = await driver.do(cmd.Renew(("held",)))
    assert renewed == [ev.LeasesRenewed(100.0, ("held",))]
    assert isinstance(await driver.find("held"), ActiveLease)


async def test_on_a_full_disk_a_waiter_whose_grant_is_not_written_is_not_lost() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer)
    for lease_id in ("first", "next"):
        driver.note(ask(lease_id))
    await turns()
    writer.finish()
    driver.note(cmd.Release("first"))
    driver.note(look(at=101.0))
    await turns()
    assert "LeaseGranted" in kinds(writer.orders[0][0].events)
    writer.finish(JournalError("the disk is full"))
    assert await driver.do(cmd.Renew(("next",))) == [ev.LeasesRenewed(100.0, ("next",))]
    assert [type(event) for event in await driver.do(cmd.Renew(("first",)))] == [ev.Refused]


async def test_when_the_disk_has_room_again_all_goes_on_and_the_same_request_is_the_same_lease() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer)
    answer = asyncio.ensure_future(driver.do(ask("a")))
    await turns()
    writer.finish(JournalError("the disk is full"))
    with pytest.raises(NotWritten):
        await answer
    driver.note(cmd.EndLease("a", EndReason.HOLDER_DIED))
    await writer.next_order()  # the driver tries again by itself
    writer.finish()
    assert driver.trouble is None
    await turns()
    writer.finish()  # the death that was put off
    drains = await driver.find("a")
    assert isinstance(drains, EndedLease)
    assert drains.draining
    assert kinds(writer.journal.load(1).events)[-3:] == ["NodeJoined", "LeaseGranted", "LeaseEnded"]


async def test_what_came_after_a_batch_that_failed_is_written_behind_it() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer, gpus=2)
    first = asyncio.ensure_future(driver.do(ask("a")))
    await turns()
    second = asyncio.ensure_future(driver.do(ask("b")))
    await turns()
    writer.finish(JournalError("the disk is full"))
    for answer in (first, second):
        with pytest.raises(NotWritten, match="the disk is full"):
            await answer
    for _ in range(2):
        await writer.next_order()
        writer.finish()
    granted = [event.lease_id for event in writer.journal.load(1).events if isinstance(event, ev.LeaseGranted)]
    assert granted == ["a", "b"]
    assert isinstance(await driver.find("b"), ActiveLease)


async def test_a_batch_that_is_written_while_the_server_stops_is_answered_and_nothing_is_taken_any_more() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer)
    answer = asyncio.ensure_future(driver.do(ask("a")))
    await turns()
    (batch, done), writer.orders = writer.orders[0], []
    driver.close()
    done(batch, None)
    assert kinds(await answer) == ["LeaseGranted"]
    assert driver.trouble == "the server is stopping"


async def test_a_journal_that_is_damaged_is_replaced_by_what_is_known() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer, gpus=2)
    held = asyncio.ensure_future(driver.do(ask("held")))
    await turns()
    writer.finish()
    await held
    answer = asyncio.ensure_future(driver.do(ask("a")))
    await turns()
    driver.note(cmd.Release("held"))  # gathered, when the damage is found
    await turns()
    writer.finish(JournalDamaged("it is gone"))
    with pytest.raises(NotWritten):
        await answer
    await writer.next_order()
    assert writer.orders[0][0].replaces_damaged
    writer.finish()
    assert driver.trouble is None
    assert not writer.orders, "the snapshot has the release"
    again = restored(writer.journal.load(100), PoolSettings())
    assert {id_: type(lease) for id_, lease in again.leases.items()} == {"held": EndedLease, "a": ActiveLease}
    assert again.fences == driver.state.fences


async def test_somebody_who_is_dead_when_his_turn_comes_is_passed_over() -> None:
    dead = {2}
    driver = await opened(is_alive=lambda process: process.pid not in dead)
    for pid in (1, 2, 3):
        await driver.do(ask(f"lease{pid}", pid))
    await driver.do(cmd.Release("lease1"))
    await driver.do(look(at=101.0))
    await driver.do(look(at=101.0))
    lease = await driver.find("lease2")
    assert isinstance(lease, EndedLease)
    assert lease.reason is EndReason.HOLDER_DIED
    assert isinstance(await driver.find("lease3"), ActiveLease)


async def test_who_gives_up_waiting_leaves_no_trace_and_disturbs_nobody() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer)
    first = [asyncio.ensure_future(driver.do(ask(name))) for name in ("a", "b")]
    await turns()
    first[0].cancel()
    await turns()
    writer.finish()
    assert kinds(await first[1]) == ["LeaseQueued"]
    waiting = [asyncio.ensure_future(driver.wait_while_queued("b", SOON_S)) for _ in range(2)]
    await turns()
    assert "2 waited for" in repr(driver)
    waiting[0].cancel()
    await turns()
    assert "1 waited for" in repr(driver)
    driver.release_waiters()
    await waiting[1]
    assert "0 waited for" in repr(driver)


async def test_waiting_ends_when_the_time_is_over() -> None:
    driver = await opened()
    await driver.do(ask("a"))
    await driver.do(ask("b"))
    await driver.wait_while_queued("b", 0.01)
    assert isinstance(await driver.find("b"), QueuedLease)
    assert "0 waited for" in repr(driver)


async def test_late_listeners_are_told_after_the_callers_and_in_the_same_turn() -> None:
    driver = await opened()
    told: list[str] = []
    driver.listeners.append(lambda _: told.append("listener"))
    driver.late_listeners.append(lambda _: told.append("late listener"))

    async def call() -> None:
        await driver.do(ask("a"))
        told.append("caller")

    await asyncio.create_task(call())
    await asyncio.sleep(0)
    assert told == ["listener", "caller", "late listener"]
    driver.close()


async def test_a_lease_runs_out_by_itself() -> None:
    loop = asyncio.get_running_loop()
    driver = await opened(clock=loop.time)
    driver.note(look(at=loop.time()))
    await driver.do(ask("a", ttl_s=0.1))
    await driver.do(ask("b"))
    ended = loop.create_future()

    def watch(events: Sequence[ev.Event]) -> None:
        if any(isinstance(event, ev.LeaseEnded) for event in events):
            ended.set_result(None)

    driver.listeners.append(watch)
    async with asyncio.timeout(SOON_S):
        await ended
    driver.note(look(at=loop.time()))
    lease = await driver.find("b")
    assert isinstance(lease, ActiveLease)
    driver.close()


async def test_a_history_that_has_grown_long_is_compacted() -> None:
    journal = MemoryJournal()
    driver = Driver(PoolSettings(), clock=Clock())
    driver.lead(driver.state, InlineWriter(journal), boot_id="boot", wall_clock=lambda: 0.0, node="box")
    await driver.do(look())
    await driver.do(ask("kept"))
    number = 0
    while journal.events_since_compaction < SHORTEST_TO_COMPACT - 200:
        number += 1
        await asyncio.gather(*(driver.do(ask(f"lease{number}-{part}")) for part in range(100)))
        await asyncio.gather(*(driver.do(cmd.Release(f"lease{number}-{part}")) for part in range(100)))
    while journal.events_since_compaction > 200:
        number += 1
        await driver.do(ask(f"lease{number}"))
        await driver.do(cmd.Release(f"lease{number}"))
    await driver.do(ask("last"))
    events = journal.load(1).events
    assert len(events) < 100
    assert ev.new_leases(events).keys() >= {"kept", "last"}


async def test_a_thread_writes_and_what_it_wrote_is_there_when_it_is_closed() -> None:
    journal = MemoryJournal()
    driver = Driver(PoolSettings(), clock=Clock())
    driver.lead(
        driver.state,
        WriterThread(journal, asyncio.get_running_loop()),
        boot_id="boot",
        wall_clock=lambda: 0.0,
        node="box",
    )
    await driver.do(look())
    await driver.do(ask("a"))
    driver.note(cmd.Release("a"))
    driver.close()
    assert kinds(journal.load(1).events)[-3:] == ["NodeJoined", "LeaseGranted", "LeaseEnded"]
    with pytest.raises(NotWritten, match="stopping"):
        await driver.do(ask("b"))


def test_a_journal_that_contradicts_itself_is_not_gone_on_with() -> None:
    journal = MemoryJournal()
    journal.append([ev.LeaseGranted(1.0, "nobody", (GpuKey("box", "GPU-0"),), 1, 1.0)], [])
    with pytest.raises(JournalDamaged, match="contradict"):
        restored(journal.load(1), PoolSettings())


async def test_one_turn_grants_what_it_has_time_for_and_the_next_turns_go_on_in_order() -> None:
    journal, work = MemoryJournal(), Work(0.0)
    driver = Driver(PoolSettings(max_sharers=1000), clock=Clock(), work_clock=work)
    driver.lead(driver.state, InlineWriter(journal), boot_id="boot", wall_clock=lambda: 0.0, node="box")
    grants: list[list[str]] = []
    driver.early_listeners.append(
        lambda events: grants.append([event.lease_id for event in events if isinstance(event, ev.LeaseGranted)])
    )
    ids = [f"lease{number}" for number in range(100)]
    for lease_id in ids:
        await driver.do(cmd.RequestLease(lease_id, Request(Wishes(memory_mb=1.0), ttl_s=1000.0)))
    work.each_s = TURN_S / 10
    driver.note(look())
    await turns(50)
    assert not len(driver.state.queue)
    assert max(map(len, grants)) in (8, 9), "each pass asks for the time once"
    assert [lease_id for turn in grants for lease_id in turn] == ids
    assert replay(PoolState(settings=driver.state.settings), journal.load(100).events).leases == driver.state.leases


async def test_who_asks_in_a_turn_that_has_no_time_left_still_gets_what_is_free() -> None:
    driver = await opened(gpus=100, work_clock=Work(TURN_S / 3))
    await asyncio.gather(*(driver.do(ask(f"lease{number}")) for number in range(100)))
    assert all(isinstance(lease, ActiveLease) for lease in driver.state.leases.values())
    driver.close()
