"""GET /events?pace_s=...: that something happened, in this process; over a connection see ui/test_page.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Self

import pytest

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.routes.events import CHANGED, MOST_PENDING, MOST_SENT, STILL_HERE, Streams
from gpu_worker_pool.server.settings import ServerSettings
from tests.server.settling import settled

NEVER_S = 1000.0
A_CHANGE = ev.LeaseQueued(1.0, "a", Request(), 1, 1.0)


@pytest.fixture
def pool() -> Pool:
    """One that was never started: it is told by the tests what happens."""
    return create_app(ServerSettings(_env_file=None, simulated_gpus="1")).pool


class Page:
    """A client that listens."""

    def __init__(self, changes: Streams, *, pace_s: float = NEVER_S) -> None:
        self._told: AsyncGenerator[bytes, None] = changes.subscribe("ann", pace_s=pace_s)

    async def next(self) -> bytes:
        return await anext(self._told)

    async def opened(self) -> Self:
        assert await self.next() == b"retry: 1000\n: connected\n\n"
        return self


async def test_the_first_change_is_told_at_once_and_all_later_ones_together_when_it_is_time(
    pool: Pool,
) -> None:
    changes = Streams(pool)
    page, quick = Page(changes), Page(changes, pace_s=0.001)
    await page.opened()
    await quick.opened()
    hears = [asyncio.create_task(one.next()) for one in (page, quick)]
    await settled()
    changes.follow([A_CHANGE])
    assert [await one for one in hears] == [CHANGED, CHANGED]

    hears = [asyncio.create_task(one.next()) for one in (page, quick)]
    await settled()
    for _ in range(5):
        changes.follow([A_CHANGE])
    assert await hears[1] == CHANGED
    assert not hears[0].done(), "its time has not come"
    changes.close()
    with pytest.raises(StopAsyncIteration):
        await hears[0]


async def test_what_is_a_change_and_what_is_not(pool: Pool) -> None:
    changes = Streams(pool, heartbeat_s=0.001)
    page = await Page(changes, pace_s=0.001).opened()
    for event in (
        ev.LeasesRenewed(1.0, ("a",)),
        ev.QueueSettled(1.0, 2.0, None),
        ev.Refused(1.0, ev.RefusalCode.UNKNOWN_LEASE, "b"),
    ):
        changes.follow([event])
        assert await page.next() == STILL_HERE
    changes.follow([ev.LeasesRenewed(1.0, ("a",)), ev.LeaseEnded(1.0, "a", EndReason.RELEASED, (), 1.0)])
    assert await page.next() == CHANGED


async def test_what_was_measured_counts_once_whichever_tells_of_it_first(pool: Pool) -> None:
    changes = Streams(pool, heartbeat_s=0.001)
    page = await Page(changes, pace_s=0.001).opened()
    changes.follow([ev.GpusObserved(1.0, ())])
    assert await page.next() == CHANGED
    changes.note_snapshot(pool.snapshot)
    changes.follow([ev.GpusObserved(2.0, ())])
    assert await page.next() == STILL_HERE
    changes.note_snapshot(replace(pool.snapshot, at=5.0))
    assert await page.next() == CHANGED


async def test_in_quiet_it_hears_that_the_server_is_still_here(pool: Pool) -> None:
    changes = Streams(pool, heartbeat_s=0.001)
    page = Page(changes)
    await page.opened()
    assert [await page.next(), await page.next()] == [STILL_HERE, STILL_HERE]
    changes.follow([A_CHANGE])
    assert await page.next() == CHANGED


async def test_what_a_slow_follower_missed_comes_in_pieces_and_what_is_kept_for_it_is_bounded(pool: Pool) -> None:
    changes = Streams(pool)
    messages = changes.subscribe("ann")
    assert b": connected" in await anext(messages)
    changes.follow([A_CHANGE] * (MOST_SENT + 1))
    assert [(await anext(messages)).count(b"event: lease_queued") for _ in range(2)] == [MOST_SENT, 1]
    changes.follow([A_CHANGE] * (MOST_PENDING + 1))
    assert await anext(messages) == b"event: reset\ndata: {}\n\n", "what is not kept cannot be sent"
    await messages.aclose()
