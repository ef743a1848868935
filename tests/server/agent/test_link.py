"""What one end has to tell waits up to a bound, and what was told before a close is sent first."""

from __future__ import annotations

import asyncio

import pytest

from gpu_worker_pool.server.agent.frames import MOST_BYTES, Ask
from gpu_worker_pool.server.agent.handshake import Seal
from gpu_worker_pool.server.agent.link import BoxLink, LinkLost, LinkReply
from tests.server.fleet.two_boxes import MemorySocket, linked, never


class FullSocket(MemorySocket):
    async def send(self, frame: bytes) -> None:
        await asyncio.Event().wait()


async def run(link: BoxLink) -> None:
    await link.run(str, lambda _: None, never)


async def test_a_box_that_does_not_take_what_it_is_told_is_cut_off() -> None:
    link = BoxLink(FullSocket(), Seal(b"key", "leader"), "box")
    running = asyncio.ensure_future(run(link))
    piece = "x" * (MOST_BYTES // 2)
    link.tell(piece)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    link.tell(piece)
    link.tell("and more")
    await asyncio.sleep(0)
    assert not running.done(), "what is on its way does not count"

    link.tell(piece)

    with pytest.raises(LinkLost, match="does not take what it is told"):
        await running
    answer = link.ask("GET", "/pool")
    with pytest.raises(LinkLost, match="has ended"):
        await answer.begun


async def test_what_was_told_before_a_close_is_sent_first() -> None:
    sent = MemorySocket()
    link = BoxLink(socket := MemorySocket(), Seal(b"key", "leader"), "box")
    socket.other = sent
    link.tell("first")
    link.close("the leader stops")
    with pytest.raises(LinkLost, match="the leader stops"):
        await run(link)
    assert Seal(b"key", "agent").open(await sent.receive()) == b"first"


async def test_a_call_that_is_served_is_answered_before_a_close() -> None:
    """A leader that steps down refuses its callers first."""
    begun, refused = asyncio.Event(), asyncio.Event()

    async def refuse(_: Ask, __: bytes, reply: LinkReply) -> None:
        begun.set()
        await refused.wait()
        await reply.begin(503, body=b"no longer")

    async with linked(refuse) as (box, leader, _):
        answer = box.ask("PUT", "/leases/a")
        await begun.wait()
        leader.close("the leader steps down")
        refused.set()
        assert ((await answer.begun).status, answer.whole) == (503, b"no longer")
