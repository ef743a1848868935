"""Asking boxes of the fleet who leads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import aiohttp

from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.server.agent.leader_search import LeaderSearch

ASK_S = 2.0
_MOST_BYTES = 64 * 1024


async def ask_who_leads(session: aiohttp.ClientSession, urls: Sequence[str], search: LeaderSearch) -> None:
    """Ask all of them at once, until one names a leader that can be tried."""
    asking = [asyncio.ensure_future(_ask(session, url, search)) for url in urls]
    try:
        for answer in asyncio.as_completed(asking):
            if await answer:
                return
    finally:
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer; a ValueError if it is too long. It may come without a length, and compressed."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > _MOST_BYTES:
            raise ValueError(f"its answer is longer than {_MOST_BYTES} bytes")
    return bytes(body)


async def _ask(session: aiohttp.ClientSession, url: str, search: LeaderSearch) -> bool:
    try:
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        async with session.get(f"{url}/health", timeout=timeout, allow_redirects=False) as answer:
            health = json.loads(await _body(answer))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError) as error:
        why = f"not within {ASK_S:g} s" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        search.silent(url, why)
        return False
    fleet = health.get("fleet") if isinstance(health, dict) else None
    if not isinstance(fleet, dict):
        search.silent(url, "it is not a box of a fleet")
        return False
    leader = str(fleet.get("leader_url"))
    return search.told(url, leader if leader.startswith(("http://", "https://")) else None, boot_time())
