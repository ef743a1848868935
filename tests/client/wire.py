"""A line between a client and a server that can be cut, frozen and slowed, and on which the calls are counted."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

from tests.listener import ListenerThread

_REQUEST = re.compile(rb"(GET|PUT|POST|DELETE) (/[^ ?]*)[^ ]* HTTP/1\.1\r\n")


class Wire(ListenerThread):
    """Bytes from one side to the other, in a thread of its own.

    `is_cut`: every connection is broken off, and new ones are too. `is_frozen`: nothing comes through, and nobody is told.
    `delay_s`: how long each piece takes to the server; a caller who hangs up does not get back what is on its way.
    """

    def __init__(self, server_port: int) -> None:
        super().__init__()
        self.server_port = server_port
        self.is_frozen = False
        self.delay_s = 0.0
        self.delayed_methods: tuple[bytes, ...] = (b"GET", b"PUT", b"POST", b"DELETE")
        self.calls: Counter[str] = Counter()
        self._is_cut = False
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Nothing comes through from now on."""
        self._is_cut = True
        self.loop.call_soon_threadsafe(self._break_off)

    def mend(self) -> None:
        """It works again."""
        self._is_cut = False
        self.is_frozen = False

    def _break_off(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
