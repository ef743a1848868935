"""A body is read up to a size and up to a time, and no further."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive

from gpu_worker_pool.server.authority.presence import ClientGone
from gpu_worker_pool.server.http.call import read_body
from gpu_worker_pool.server.http.problems import Refusal


class Wire:
    """What a client sends, and how much of it was taken. It stays silent at its end."""

    def __init__(self, *chunks: bytes, ends: bool = True, leaves: bool = False) -> None:
        self.taken = 0
        self._messages: list[Message] = [{"type": "http.request", "body": c, "more_body": True} for c in chunks]
        if ends:
            self._messages.append({"type": "http.request"})  # both keys may be left out
        if leaves:
            self._messages.append({"type": "http.disconnect"})

    async def receive(self) -> Message:
        if self.taken == len(self._messages):
            await asyncio.Event().wait()
        self.taken += 1
        return self._messages[self.taken - 1]


@pytest.mark.parametrize(
    ("chunks", "body"),
    [((), b""), ((b"{}",), b"{}"), ((b"{", b"", b"}"), b"{}"), ((b"x" * 10,), b"x" * 10), ((b"x",) * 10, b"x" * 10)],
)
async def test_a_body_is_put_together_up_to_the_limit(chunks: tuple[bytes, ...], body: bytes) -> None:
    assert await read_body(Wire(*chunks).receive, {}, limit=10) == body


async def test_nothing_is_asked_for_after_the_end() -> None:
    wire = Wire(b"{}", leaves=True)
    assert await read_body(wire.receive, {}) == b"{}"
    assert wire.taken == 2


@pytest.mark.parametrize("headers", [{}, {"content-length": "3"}, {"content-length": "nonsense"}])
async def test_bytes_are_counted_as_they_come(headers: dict[str, str]) -> None:
    wire = Wire(b"x" * 6, b"x" * 5, b"x" * 6)
    with pytest.raises(Refusal, match="at most 10 bytes") as caught:
        await read_body(wire.receive, headers, limit=10)
    assert (caught.value.status, caught.value.headers) == (413, {"Connection": "close"})
    assert wire.taken == 2


@pytest.mark.parametrize("length", ["11", " 11 ", "9" * 5000])
async def test_a_length_over_the_limit_is_refused_unread(length: str) -> None:
    wire = Wire(b"x")
    with pytest.raises(Refusal, match="too large"):
        await read_body(wire.receive, {"content-length": length}, limit=10)
    assert wire.taken == 0


@pytest.mark.parametrize("length", ["10", "0", "", "-5", "1, 1", "²"])
async def test_any_other_length_leaves_it_to_the_counting(length: str) -> None:
    assert await read_body(Wire(b"x" * 10).receive, {"content-length": length}, limit=10) == b"x" * 10


@pytest.mark.parametrize("chunks", [(), (b"{",), (b"{", b'"', b"g")])
async def test_silence_before_the_end_is_too_slow(chunks: tuple[bytes, ...]) -> None:
    with pytest.raises(Refusal, match="within 0 seconds") as caught:
        async with asyncio.timeout(2):  # and not at some later time
            await read_body(Wire(*chunks, ends=False).receive, {}, timeout_s=0)
    assert (caught.value.status, caught.value.headers) == (408, {"Connection": "close"})


async def test_the_time_is_for_the_whole_body_and_not_for_each_byte() -> None:
    async def drip() -> Message:
        await asyncio.sleep(0)  # another turn of the loop, and then a byte, forever
        return {"type": "http.request", "body": b"", "more_body": True}

    with pytest.raises(Refusal, match="did not arrive"):
        await read_body(drip, {}, timeout_s=0.001)


async def test_what_is_there_already_is_taken_however_short_the_time() -> None:
    assert await read_body(Wire(b"{}").receive, {}, timeout_s=0) == b"{}"


@pytest.mark.parametrize("chunks", [(), (b"{",)])
async def test_a_client_that_leaves_is_told_from_one_that_is_slow(chunks: tuple[bytes, ...]) -> None:
    with pytest.raises(ClientGone):
        await read_body(Wire(*chunks, ends=False, leaves=True).receive, {})


@pytest.mark.parametrize(
    ("encoding", "is_taken"),
    [("", True), ("identity", True), (" Identity ", True), ("gzip", False), ("br", False), ("identity, gzip", False)],
)
async def test_only_plain_bodies_are_taken(encoding: str, is_taken: bool) -> None:
    wire = Wire(b"{}")
    if is_taken:
        assert await read_body(wire.receive, {"content-encoding": encoding}) == b"{}"
        return
    with pytest.raises(Refusal, match="compressed") as caught:
        await read_body(wire.receive, {"content-encoding": encoding})
    assert (caught.value.status, wire.taken) == (415, 0)


async def test_who_gives_up_waiting_for_a_body_is_not_told_that_it_was_slow() -> None:
    receive: Receive = Wire(ends=False).receive
    reading = asyncio.create_task(read_body(receive, {}))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
