"""A box that is asked who leads may answer anything: what is read of it is bounded."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import aiohttp
import pytest

from gpu_worker_pool.server.agent.leader_search import LeaderSearch
from gpu_worker_pool.server.agent.link import ask_who_leads
from tests.listener import Listener

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("piece", "number", "why"),
    [(b" " * 65_536, 100_000, "longer than 65536 bytes"), (b"[" * 60_000, 1, "recursion")],
    ids=["without an end", "deep"],
)
async def test_an_answer_that_would_take_memory_or_time_counts_as_none(piece: bytes, number: int, why: str) -> None:
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        with suppress(ConnectionError):
            for _ in range(number):
                writer.write(piece)
                await writer.drain()
                sent += 1

    listener = Listener(answer)
    listener.start()
    url = f"http://127.0.0.1:{listener.port}"
    search = LeaderSearch([url], 0.0)
    try:
        async with aiohttp.ClientSession() as session:
            await ask_who_leads(session, [url], search)
    finally:
        await listener.stop()

    assert why in str(search.trouble)
    assert sent < 1000, "the rest was not read"
