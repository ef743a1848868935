"""A line between a client and a server that can be cut, frozen and slowed, and on which the calls are counted."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from tests.listener import Listener

_REQUEST = re.compile(rb"(GET|PUT|POST|DELETE) (/[^ ?]*)[^ ]* HTTP/1\.1\r\n")
START_S = 30.0


class Wire:
    """Bytes from one side to the other, in a thread of its own.

    `is_cut`: every connection is broken off, and new ones are too. `is_frozen`: nothing comes through, and nobody is told.
    `delay_s`: how long each piece takes to the server; a caller who hangs up does not get back what is on its way.
    """

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.is_frozen = False
        self.delay_s = 0.0
        self.delayed_methods: tuple[bytes, ...] = (b"GET", b"PUT", b"POST", b"DELETE")
        self.calls: Counter[str] = Counter()
        self._is_cut = False
        self._loop = asyncio.new_event_loop()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._open: set[asyncio.StreamWriter] = set()
        self._listener = Listener(self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.result(START_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Nothing comes through from now on."""
        self._is_cut = True
        self._loop.call_soon_threadsafe(self._break_off)

    def mend(self) -> None:
        """It works again."""
        self._is_cut = False
        self.is_frozen = False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._listen())
            self._started.set_result(None)
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _listen(self) -> None:
        self._listener.start()

    async def _end(self) -> None:
        await self._listener.stop()
        self._break_off()

    def _break_off(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self.server_port)
        except OSError:
            writer.transport.abort()
            self._open.discard(writer)
            return
        self._open.add(forth)
        there = asyncio.ensure_future(self._pump(reader, forth, is_request=True))
        here = asyncio.ensure_future(self._pump(back, writer, is_request=False))
        try:
            # What is on its way there arrives, also when its sender has hung up.
            await asyncio.wait({there, here}, return_when=asyncio.FIRST_COMPLETED)
            if here.done():
                there.cancel()
            else:
                await there
                await asyncio.wait({here}, timeout=1.0)
        finally:
            for task in (there, here):
                task.cancel()
            for end in (writer, forth):
                end.transport.abort()
                self._open.discard(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool) -> None:
        try:
            while chunk := await reader.read(65536):
                if is_request:
                    await self._hold(chunk)
                while self.is_frozen:  # noqa: ASYNC110 - set from another thread
                    await asyncio.sleep(0.01)
                writer.write(chunk)
                await writer.drain()
            if is_request and writer.can_write_eof():
                writer.write_eof()
        except OSError:
            pass

    async def _hold(self, chunk: bytes) -> None:
        for found in _REQUEST.finditer(chunk):
            self.calls[f"{found[1].decode()} {found[2].decode()}"] += 1
        if self.delay_s and chunk.startswith(self.delayed_methods):
            await asyncio.sleep(self.delay_s)
