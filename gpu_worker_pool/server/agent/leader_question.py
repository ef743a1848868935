"""Asking a box of the fleet who leads."""

from __future__ import annotations

import aiohttp

from gpu_worker_pool.core.fleet.leader_search import LeaderSearch

ASK_S = 2.0
_MOST_BYTES = 64 * 1024


async def ask_who_leads(session: aiohttp.ClientSession, url: str, search: LeaderSearch) -> None:
    try:
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        async with session.get(f"{url}/health", timeout=timeout, allow_redirects=False) as answer:
            health = await answer.json(content_type=None) if (answer.content_length or 0) < _MOST_BYTES else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        why = f"not within {ASK_S:g} s" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        search.silent(url, why)
        return
    fleet = health.get("fleet") if isinstance(health, dict) else None
    if not isinstance(fleet, dict):
        search.silent(url, "it is not a box of a fleet")
        return
    leader = fleet.get("leader_url")
    search.told(url, leader if isinstance(leader, str) and leader.startswith(("http://", "https://")) else None)
