"""GET /events?pace_s=...: that something happened, in this process; over a connection see ui/test_page.py."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.streams.changes import STILL_HERE, ChangeStream
from gpu_worker_pool.server.streams.listener import MOST_WOKEN, Listener, Rest
from tests.server.settling import settled

NEVER_S = 1000.0
A_CHANGE = ev.LeaseQueued(1.0, "a", Request(), 1, 1.0)


@pytest.fixture
def pool() -> Pool:
    """One that was never started: it is told by the tests what happens."""
    return create_app(ServerSettings(_env_file=None, simulated_gpus="1")).pool


class Page:
    """Somebody who listens."""

    def __init__(self, changes: ChangeStream, *, pace_s: float = NEVER_S, last_event_id: str | None = None) -> None:
        self.listener = Listener()
        self._told: AsyncGenerator[bytes, None] = changes.messages(self.listener, last_event_id, pace_s)

    async def next(self) -> bytes:
        return await anext(self._told)

    async def opened(self) -> bytes:
        """The id that it is told at the beginning."""
        opening = await self.next()
        assert opening.startswith(b"retry: 1000\n")
        assert opening.endswith(b": connected\n\n")
        return opening.partition(b"id: ")[2].partition(b"\n")[0]


def changed(event: bytes) -> str:
    """The id of an event that says that something changed."""
    id_, name, data = event.decode().removesuffix("\n\n").split("\n")
    assert (name, data) == ("event: changed", "data: {}")
    return id_.removeprefix("id: ")


async def test_the_first_change_is_told_at_once_and_all_later_ones_together_when_it_is_time(
    pool: Pool,
) -> None:
    changes = ChangeStream(pool)
    page, quick = Page(changes), Page(changes, pace_s=0.001)
    epoch = (await page.opened()).decode().partition("-")[0]
    await quick.opened()
    hears = [asyncio.create_task(one.next()) for one in (page, quick)]
    await settled()
    changes.follow([A_CHANGE])
    assert [changed(await one) for one in hears] == [f"{epoch}-1", f"{epoch}-1"]

    hears = [asyncio.create_task(one.next()) for one in (page, quick)]
    await settled()
    for _ in range(5):
        changes.follow([A_CHANGE])
    assert changed(await hears[1]) == f"{epoch}-6"
    assert not hears[0].done(), "its time has not come"
    page.listener.end()
    with pytest.raises(StopAsyncIteration):
        await hears[0]


async def test_pauses_that_end_together_do_not_all_go_on_in_one_turn() -> None:
    rest, turn = Rest(), 0
    went_on: Counter[int] = Counter()

    async def pause() -> None:
        await rest.take(Listener(), 0.0)
        went_on[turn] += 1

    pauses = asyncio.gather(*(pause() for _ in range(3 * MOST_WOKEN)))
    while not pauses.done():
        turn += 1
        await asyncio.sleep(0)
    assert (len(went_on), max(went_on.values())) == (3, MOST_WOKEN)


async def test_what_is_a_change_and_what_is_not(pool: Pool) -> None:
    changes = ChangeStream(pool)
    for event in (
        ev.LeasesRenewed(1.0, ("a",)),
        ev.QueueSettled(1.0, 2.0, None),
        ev.LeaseUnknown(1.0, "b"),
    ):
        changes.follow([event])
    assert (await Page(changes).opened()).endswith(b"-0")
    changes.follow([ev.LeasesRenewed(1.0, ("a",)), ev.LeaseEnded(1.0, "a", EndReason.RELEASED, (), 1.0)])
    assert (await Page(changes).opened()).endswith(b"-1")


async def test_what_was_measured_counts_once_whoever_tells_of_it_first(pool: Pool) -> None:
    changes = ChangeStream(pool)
    changes.follow([ev.GpusObserved(1.0, ())])
    changes.note_snapshot(pool.snapshot)
    changes.follow([ev.GpusObserved(2.0, ())])
    assert (await Page(changes).opened()).endswith(b"-1")
    changes.note_snapshot(replace(pool.snapshot, at=5.0))
    assert (await Page(changes).opened()).endswith(b"-2")


async def test_who_comes_back_hears_at_once_whether_he_missed_anything(pool: Pool) -> None:
    changes = ChangeStream(pool)
    known = (await Page(changes).opened()).decode()
    missed_nothing = Page(changes, last_event_id=known)
    await missed_nothing.opened()
    hears = asyncio.create_task(missed_nothing.next())
    await settled()
    assert not hears.done()
    changes.follow([A_CHANGE])
    latest = changed(await hears)

    epoch = latest.partition("-")[0]
    for unknown in (
        known,
        "deadbeef-1",
        "",
        "nonsense",
        f"{epoch}-",
        f"{epoch}-x",
        f"{epoch}-99",
        f"{epoch}-{'9' * 30}",
    ):
        page = Page(changes, last_event_id=unknown)
        assert await page.opened() == b"", "it has not seen this number before it has heard of it"
        assert changed(await page.next()) == latest, unknown


async def test_in_quiet_it_hears_that_the_server_is_still_here(pool: Pool) -> None:
    changes = ChangeStream(pool, heartbeat_s=0.001)
    page = Page(changes)
    await page.opened()
    assert [await page.next(), await page.next()] == [STILL_HERE, STILL_HERE]
    changes.follow([A_CHANGE])
    assert changed(await page.next()).endswith("-1")
