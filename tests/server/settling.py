"""Waiting in the event loop without a clock."""

from __future__ import annotations

import asyncio


async def settled() -> None:
    """All that can go on without the clock has."""
    for _ in range(10):
        await asyncio.sleep(0)
