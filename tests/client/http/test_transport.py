"""Calls over connections that are used again, and to names with several addresses."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from gpu_worker_pool.client.http import transport
from gpu_worker_pool.client.http.transport import CallFailed, Transport

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"answer":1}'
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[int]:
    """A server; its port."""
    over: list[asyncio.Task[None]] = []

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
            with suppress(OSError):
                await reader.read()
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over.append(asyncio.create_task(serve_and_close(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    await asyncio.gather(*over)


class OneAnswer:
    """Answers the first call of each connection, and hangs up when it sees a second one."""

    def __init__(self, answer: bytes = ANSWER) -> None:
        self.answer = answer
        self.calls: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.calls.append(head.decode().split()[0])
        writer.write(self.answer)
        await reader.read(1)
        writer.transport.abort()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_a_connection_that_was_closed_meanwhile_is_made_again(method: str) -> None:
    serve = OneAnswer()
    async with listening(serve) as port, Transport() as transport:
        for _ in range(3):
            reply = await transport.call(method, f"http://127.0.0.1:{port}", "/leases/a", timeout_s=10)
            assert reply.data == {"answer": 1}
    assert serve.calls == [method] * 3


async def test_a_call_that_must_not_be_made_twice_is_not() -> None:
    serve = OneAnswer()
    async with listening(serve) as port, Transport() as transport:
        url = f"http://127.0.0.1:{port}"
        await transport.call("POST", url, "/leases/renew", body={}, timeout_s=10)
        with pytest.raises(CallFailed):
            await transport.call("POST", url, "/leases/renew", body={}, timeout_s=10)
    assert serve.calls == ["POST"]


async def test_what_was_not_asked_for_is_not_taken_for_the_next_answer() -> None:
    serve = OneAnswer(ANSWER + ANSWER.replace(b"1}", b"2}"))
    async with listening(serve) as port, Transport() as transport:
        for _ in range(2):
            assert (await transport.call("GET", f"http://127.0.0.1:{port}", "/pool", timeout_s=10)).data == {
                "answer": 1
            }


async def test_a_name_whose_first_address_refuses_is_reached_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead_port = free.getsockname()[1]

    def look_up(host: str, port: int, *args: Any, **options: Any) -> Any:
        if host != "two.example":
            return real(host, port, *args, **options)
        if options.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "not an address")
        return real("127.0.0.1", dead_port, *args, **options) + real("127.0.0.1", port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with listening(OneAnswer()) as port, Transport() as transport:
        assert (await transport.call("GET", f"http://two.example:{port}", "/pool", timeout_s=10)).data == {"answer": 1}
        with pytest.raises(CallFailed, match="cannot connect: Connection refused"):
            await transport.call("GET", f"http://two.example:{dead_port}", "/pool", timeout_s=10)


async def test_no_path_adds_to_the_head_of_a_call() -> None:
    """What is not plain ASCII is sent in its coded form."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(ANSWER)

    async with listening(serve) as port, Transport(uses_sockets=False) as transport:
        await transport.call("GET", f"http://127.0.0.1:{port}", "/bücher/a b\r\nX: 1?queue=0&by=%2F", timeout_s=10)
        with pytest.raises(CallFailed, match="looked up"):
            await transport.call("GET", "http://bü..cher:1", "/pool", timeout_s=10)
    assert heads[0].startswith(b"GET /b%C3%BCcher/a%20b%0D%0AX:%201?queue=0&by=%2F HTTP/1.1\r\n")


async def test_what_comes_over_an_idle_connection_closes_it() -> None:
    """Nothing of it is kept, however much a server sends."""
    has_answered, has_ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await has_answered.wait()
        with suppress(OSError):
            for _ in range(512):
                writer.write(b"x" * 65536)
                await writer.drain()
        has_ended.set()

    async with listening(serve) as port, Transport() as client:
        await client.call("GET", f"http://127.0.0.1:{port}", "/pool", timeout_s=10)
        tracemalloc.start()
        try:
            has_answered.set()
            await has_ended.wait()
            assert tracemalloc.get_traced_memory()[0] < 1024 * 1024
        finally:
            tracemalloc.stop()


class Crowd:
    """Answers when eight connections have called, over however many ports; tells when no more than a number of them are open."""

    def __init__(self) -> None:
        self._open = 0
        self._all_came = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self._open += 1
        if self._open == 8:
            self._all_came.set()
        await self._all_came.wait()
        writer.write(ANSWER)
        await reader.read()
        self._open -= 1
        if self._open == 3:
            self.left.set()


async def test_idle_connections_are_bound_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MOST_IDLE", 3)
    crowd = Crowd()
    async with listening(crowd) as one, listening(crowd) as other, Transport() as client:
        urls = [f"http://127.0.0.1:{port}" for port in (one, other)] * 4
        await asyncio.gather(*(client.call("GET", url, "/pool", timeout_s=10) for url in urls))
        async with asyncio.timeout(10):
            await crowd.left.wait()
