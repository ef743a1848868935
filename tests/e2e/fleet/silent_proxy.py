"""A network between a candidate and its database that can go silent: nothing arrives, and no connection breaks.

What is sent meanwhile waits, as in the buffers of TCP, and arrives when the network is back: an append or a claim may be
carried out long after its sender gave it up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from tests.ledger.postgres.proxy import LossyProxy


class SilentProxy:
    """A LossyProxy in a thread of its own. A partition may have one way only; `restore` ends it."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._proxy = LossyProxy(url)
        self._run(self._proxy.start)
        self.url = self._proxy.url
        self.port = urlsplit(self.url).port

    def stop_requests(self) -> None:
        self._proxy.held_back = b""
        self._call(self._proxy.requests.clear)

    def stop_answers(self) -> None:
        self._call(self._proxy.answers.clear)

    def cut(self) -> None:
        self._call(self._proxy.requests.clear, self._proxy.answers.clear)

    def restore(self) -> None:
        self._call(self._proxy.requests.set, self._proxy.answers.set)

    @property
    def held_back(self) -> bytes:
        """What arrived since `stop_requests`."""
        return self._proxy.held_back

    def close(self) -> None:
        self._run(self._proxy.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, *works: Callable[[], None]) -> None:
        async def call() -> None:
            for work in works:
                work()

        self._run(call)

    def _run(self, work: Callable[[], Awaitable[object]]) -> None:
        async def run() -> None:
            await work()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()
