"""A TCP proxy before the database that loses what it is told to lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from tests.listener import Listener


class LossyProxy:
    """Forwards both ways. `requests` and `answers` can be held back; `cuts_at_answer` ends the next connection that the
    server answers, without the answer.
    """

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._listener = Listener(self._serve)
        self.requests, self.answers = asyncio.Event(), asyncio.Event()
        self.requests.set()
        self.answers.set()
        self.has_request = asyncio.Event()  # one arrived while requests were held back
        self.held_back = b""
        self.cuts_at_answer = False
        self.accepted = 0

    @property
    def url(self) -> str:
        return self._parts._replace(netloc=f"{self._parts.username}@127.0.0.1:{self._listener.port}").geturl()

    async def start(self) -> None:
        self._listener.start()

    async def stop(self) -> None:
        await self._listener.stop()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        # An OSError here means that the database is away; then this connection is too.
        server, to_server = await asyncio.open_connection("127.0.0.1", self._parts.port)
        both = [
            asyncio.ensure_future(self._forward_requests(client, to_server)),
            asyncio.ensure_future(self._forward_answers(server, to_client)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe in both:
                pipe.cancel()
            to_server.close()
            with suppress(asyncio.CancelledError, OSError):
                await asyncio.gather(*both, return_exceptions=True)

    async def _forward_requests(self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        while data := await client.read(65536):
            if not self.requests.is_set():
                self.held_back += data
                self.has_request.set()
                await self.requests.wait()
            to_server.write(data)

    async def _forward_answers(self, server: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        while data := await server.read(65536):
            if self.cuts_at_answer:
                self.cuts_at_answer = False
                return
            await self.answers.wait()
            to_client.write(data)


@asynccontextmanager
async def lossy(url: str) -> AsyncIterator[LossyProxy]:
    proxy = LossyProxy(url)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
