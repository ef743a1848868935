"""A bad network between workers and server: delays, cuts, half-closes, lost answers, duplicates of requests.

Raw TCP on both sides. It reads as much of a request as it must to send it twice, and understands nothing else of it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tests.listener import Listener

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
LONGEST_DELAY_S = 0.5
LONGEST_HANG_S = 3.0
LATEST_DUPLICATE_S = 2.0


class Proxy:
    """`badness` is the share of requests that something is done to; while `is_cut` nothing comes through."""

    def __init__(self, server_port: int, seed: object) -> None:
        self.server_port = server_port
        self.badness = 0.0
        self.is_cut = False
        self.counts: Counter[str] = Counter()
        self._random = random.Random(f"proxy/{seed}")
        self._listener = Listener(self._serve)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[Writer] = set()
        self._faults: dict[str, Callable[[bytes, Reader, Writer], Awaitable[None]]] = {
            "delayed": self._delay,
            "request_cut": self._cut_request,
            "answer_cut": self._cut_answer,
            "answer_lost": self._lose_answer,
            "half_closed": self._half_close,
            "duplicated": self._duplicate,
            "duplicate_hung_up": self._duplicate_and_hang_up,
            "hung": self._hang,
        }

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self) -> None:
        self._listener.start()

    async def stop(self) -> None:
        await self._listener.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cut()

    def cut(self) -> None:
        """Break off every connection there is."""
        self.counts["connections_cut"] += len(self._open)
        for writer in self._open:
            writer.transport.abort()

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        self._open.add(writer)
        try:
            request = await _read_request(reader)
            if self.is_cut:
                return
            if self._random.random() < self.badness:
                name = self._random.choice([*self._faults, "duplicate_hung_up"])
                self.counts[name] += 1
                await self._faults[name](request, reader, writer)
            else:
                self.counts["passed"] += 1
                await self._pass(request, reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # one side is gone, so the other side is let go
        finally:
            self._open.discard(writer)
            await _end(writer)

    async def _connect(self) -> tuple[Reader, Writer]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server_port)
        self._open.add(writer)
        return reader, writer

    def _hang_up(self, writer: Writer) -> None:
        self._open.discard(writer)
        writer.transport.abort()

    # --- what is done to a request ---------------------------------------------------------------------------------

    async def _pass(self, request: bytes, reader: Reader, writer: Writer, *, half_closes: bool = False) -> None:
        answer, server = await self._connect()
        try:
            server.write(request)
            if half_closes:
                server.write_eof()
            pump = asyncio.ensure_future(_pump(answer, writer))
            gone = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            for task in (pump, gone):
                task.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
        finally:
            self._hang_up(server)

    async def _delay(self, request: bytes, reader: Reader, writer: Writer) -> None:
        await asyncio.sleep(self._random.uniform(0, LONGEST_DELAY_S))
        await self._pass(request, reader, writer)

    async def _cut_request(self, request: bytes, reader: Reader, writer: Writer) -> None:
        _, server = await self._connect()
        server.write(request[: self._random.randrange(len(request))])
        await server.drain()
        self._hang_up(server)

    async def _answer_to(self, request: bytes) -> bytes:
        answer, server = await self._connect()
        try:
            server.write(request)
            return await asyncio.wait_for(answer.read(), LONGEST_HANG_S)
        except TimeoutError:
            return b""
        finally:
            self._hang_up(server)

    async def _cut_answer(self, request: bytes, reader: Reader, writer: Writer) -> None:
        answer = await self._answer_to(request)
        if answer:
            writer.write(answer[: self._random.randrange(len(answer))])
            await writer.drain()

    async def _lose_answer(self, request: bytes, reader: Reader, writer: Writer) -> None:
        await self._answer_to(request)

    async def _half_close(self, request: bytes, reader: Reader, writer: Writer) -> None:
        await self._pass(request, reader, writer, half_closes=True)

    async def _duplicate(self, request: bytes, reader: Reader, writer: Writer) -> None:
        self._begin(self._send_again(request))
        await self._pass(request, reader, writer)

    async def _send_again(self, request: bytes) -> None:
        await asyncio.sleep(self._random.choice((0.0, self._random.uniform(0, LATEST_DUPLICATE_S))))
        with suppress(OSError):
            await self._answer_to(request)

    async def _duplicate_and_hang_up(self, request: bytes, reader: Reader, writer: Writer) -> None:
        """As when a client asks again on a new connection before the server sees that the old one is gone."""
        self._begin(self._send_and_hang_up(request))
        await self._pass(request, reader, writer)

    async def _send_and_hang_up(self, request: bytes) -> None:
        try:
            _, server = await self._connect()
        except OSError:
            return
        server.write(request)
        await asyncio.sleep(self._random.uniform(0, 0.3))
        self._hang_up(server)

    async def _hang(self, request: bytes, reader: Reader, writer: Writer) -> None:
        """It arrives nowhere, and nobody says so."""
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), LONGEST_HANG_S)


async def _read_request(reader: Reader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return head + await reader.readexactly(int(value))
    return head


async def _pump(reader: Reader, writer: Writer) -> None:
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()


async def _end(writer: Writer) -> None:
    """Closed in good order where all was sent, so that what was sent arrives."""
    writer.close()
    try:
        await asyncio.wait_for(writer.wait_closed(), 1.0)
    except (OSError, TimeoutError):
        writer.transport.abort()
