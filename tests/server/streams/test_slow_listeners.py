"""A listener that reads slowly costs a piece of what happened, and what is kept for it is bounded in bytes."""

from __future__ import annotations

import re
from itertools import count
from types import SimpleNamespace
from typing import Any

from gpu_worker_pool.server.routes.events import MOST_PENDING_BYTES, PIECE_BYTES, Streams

EVENT_BYTES = 10_000


def numbers(body: bytes) -> list[int]:
    return [int(number) for number in re.findall(rb"^data: (\d+)x", body, re.MULTILINE)]


async def test_what_a_slow_listener_has_missed_comes_in_pieces_in_order() -> None:
    # Of the pool, a stream of readings needs the clock only.
    pool: Any = SimpleNamespace(follow=lambda _: None, now=lambda: 0.0, membership=None, node="box")
    number = count(1)
    unread: Any = SimpleNamespace()

    class Encoded:
        @property
        def summary_body(self) -> bytes:
            return b"%d" % next(number) + b"x" * EVENT_BYTES

    snapshot: Any = Encoded()
    stream = Streams(pool)
    stream.note_snapshot(unread)  # without a listener nothing is encoded
    messages = stream.subscribe("ann")
    assert b": connected" in await anext(messages)
    for _ in range(100):
        stream.note_snapshot(snapshot)
    pieces = [await anext(messages)]
    while numbers(pieces[-1])[-1] < 100:
        pieces.append(await anext(messages))
    assert max(map(len, pieces)) < PIECE_BYTES + 2 * EVENT_BYTES
    assert [number for piece in pieces for number in numbers(piece)] == list(range(1, 101))

    for _ in range(2 * MOST_PENDING_BYTES // EVENT_BYTES):
        stream.note_snapshot(snapshot)
    assert b"event: reset" in await anext(messages), "what is not kept cannot be sent"
    await messages.aclose()
