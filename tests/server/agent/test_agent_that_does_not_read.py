"""What a leader has to tell an agent waits up to a bound; an agent that does not take it is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from gpu_worker_pool.server.agent.message_codec import MOST_BYTES
from gpu_worker_pool.server.leader.endpoint import _AgentConnection


async def never(*_: MutableMapping[str, Any]) -> Any:
    await asyncio.Event().wait()


async def test_an_agent_that_does_not_take_what_it_is_told_is_cut_off() -> None:
    connection = _AgentConnection(never, never)
    writing = asyncio.ensure_future(connection.write_all())
    piece = "x" * (MOST_BYTES // 2)
    connection.tell(piece)
    await asyncio.sleep(0)
    connection.tell(piece)
    connection.tell("and more")
    assert not connection.end.done(), "what is on its way does not count"

    connection.tell(piece)

    with pytest.raises(Exception, match="does not take what it is told"):
        await connection.end
    writing.cancel()


async def test_what_was_told_before_a_close_is_sent_first() -> None:
    sent: list[Any] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message["text"])

    connection = _AgentConnection(never, send)
    connection.tell("first")
    connection.close("the leader stops")
    with pytest.raises(Exception, match="the leader stops"):
        await connection.write_all()
    assert sent == ["first"]
