"""Whatever goes wrong while the journal is written is its trouble: callers are told, and it is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.ledger.driver import Driver, restored
from gpu_worker_pool.ledger.journal import Journal, NotWritten
from gpu_worker_pool.ledger.outbox import Writer, WriterThread

from .memory import InlineWriter, MemoryJournal
from .test_driver import SOON_S, Clock, ask, look

MakeWriter = Callable[[Journal], Writer]
both_writers = pytest.mark.parametrize(
    "make", [InlineWriter, lambda journal: WriterThread(journal, asyncio.get_running_loop())], ids=["inline", "thread"]
)


class FaultyJournal(MemoryJournal):
    """Has a fault of ours in one of its parts, until that is healed."""

    fault: str | None = None
    is_long = False

    def append(self, events: Sequence[ev.DurableEvent], ended: Sequence[EndedLease]) -> None:
        self._fail_in("append")
        super().append(events, ended)

    def compact(self, events: Sequence[ev.DurableEvent]) -> None:
        self._fail_in("compact")
        super().compact(events)
        self.is_long = False

    @property
    def events_since_compaction(self) -> int:
        return 10**9 if self.is_long else 0

    def _fail_in(self, part: str) -> None:
        if self.fault == part:
            raise ZeroDivisionError(part)


async def opened(journal: FaultyJournal, make: MakeWriter) -> Driver:
    driver = Driver(PoolSettings(), clock=Clock())
    driver.lead(driver.state, make(journal), boot_id="boot", wall_clock=lambda: 0.0, node="box")
    await driver.do(look(2))
    return driver


@both_writers
@pytest.mark.parametrize("part", ["append", "compact"])
async def test_a_fault_is_the_journals_trouble_until_it_is_gone(make: MakeWriter, part: str) -> None:
    journal = FaultyJournal()
    driver = await opened(journal, make)
    journal.fault, journal.is_long = part, True
    async with asyncio.timeout(SOON_S):
        for _ in range(2):
            with pytest.raises(NotWritten, match=f"writing to the journal failed: ZeroDivisionError.*{part}"):
                await driver.do(ask("a"))
        assert part in (driver.trouble or "")
        with pytest.raises(NotWritten):
            await driver.do(ask("b"))
        is_written = asyncio.Event()
        driver.outbox.write_listeners.append(lambda _: is_written.set())
        journal.fault = None
        await is_written.wait()  # the driver tries again by itself
        assert driver.trouble is None
        assert [type(event) for event in await driver.do(ask("a"))] == [], "it is written already"
        await driver.do(ask("b"))
    assert isinstance(await driver.find("a"), ActiveLease)
    driver.close()
    assert not journal.is_long, "it was compacted"
    again = restored(journal.load(10), PoolSettings())
    assert {lease_id: type(lease) for lease_id, lease in again.leases.items()} == {"a": ActiveLease, "b": ActiveLease}


@both_writers
async def test_a_lease_that_is_granted_at_once_is_answered_after_one_commit(make: MakeWriter) -> None:
    journal = FaultyJournal()
    driver = await opened(journal, make)
    written_s: list[float] = []
    driver.outbox.write_listeners.append(written_s.append)
    await driver.do(ask("a"))
    assert isinstance(driver.state.leases["a"], ActiveLease)
    assert driver.outbox.is_written("a")
    await asyncio.sleep(0)
    assert len(written_s) == 1
    driver.close()
