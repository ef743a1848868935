"""Calls that are under way end when the server stops, however long they could take."""

from __future__ import annotations

import asyncio

import pytest

from gpu_worker_pool.server.http.time_limits import TimeLimits

LONG_S = 1e6


async def test_a_stop_ends_the_limits_that_are_open_and_those_that_come() -> None:
    limits = TimeLimits()
    has_begun = asyncio.Event()

    async def wait() -> None:
        async with limits.within(LONG_S):
            has_begun.set()
            await asyncio.Event().wait()

    waiting = asyncio.ensure_future(wait())
    await has_begun.wait()
    limits.stop()
    limits.stop()
    with pytest.raises(TimeoutError):
        await waiting
    with pytest.raises(TimeoutError):
        await wait()


async def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    limits = TimeLimits()
    async with limits.within(LONG_S):
        await asyncio.sleep(0)
    limits.stop()
