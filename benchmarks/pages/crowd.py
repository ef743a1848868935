"""Open pages in a process of their own: each makes the calls of the page in a browser, and draws nothing.

Its orders are lines on standard input: `open 50` and `close`. It answers each with a line when it is done: how many calls
of /ui/data/pool the pages have repeated since they were opened.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Coroutine
from typing import Any, Self

PAGE = "/ui"
POOL = "/ui/data/pool"
# While the pool keeps changing, the page requests each of these again after this many seconds.
REPEATED_S = {"/ui/data/history": 30.0, "/ui/data/usage": 3.0, "/ui/data/timeline?hours=6": 3.0}
EVENTS = "/events?pace_s=0.5"
LATEST_S = 0.3
PACE_S = 1.0
ACCEPT = "Accept: */*\r\nAccept-Encoding: gzip, deflate, br, zstd"


class Page:
    """One open page. `is_live` is set when it listens to the events."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._news = asyncio.Event()
        self.is_live = asyncio.Event()
        self.pools = 0

    async def run(self) -> None:
        """Run until it is cancelled, which closes the page."""
        async with Connection(self._port) as connection, asyncio.TaskGroup() as others:
            await connection.get(PAGE)
            others.create_task(self._listen())
            await connection.get(POOL)
            for path, every_s in REPEATED_S.items():
                others.create_task(self._repeat(path, every_s))
            while True:
                await self._news.wait()
                # Fifty pages that learn of a change at once must not all ask at once.
                await asyncio.sleep(random.uniform(0, LATEST_S))
                self._news.clear()
                asked = time.monotonic()
                await connection.get(POOL)
                self.pools += 1
                await asyncio.sleep(asked + PACE_S - time.monotonic())

    async def _repeat(self, path: str, every_s: float) -> None:
        while True:
            asked = time.monotonic()
            async with Connection(self._port) as connection:
                await connection.get(path)
            await asyncio.sleep(asked + every_s - time.monotonic())

    async def _listen(self) -> None:
        async with Connection(self._port) as connection:
            await connection.ask(EVENTS)
            self.is_live.set()
            while line := await connection.reader.readline():
                if line.startswith(b"event: changed"):
                    self._news.set()
            raise ConnectionError("the server closed the stream")


class Connection:
    """A connection to the server, kept open from call to call."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self.reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, path: str) -> bytes:
        """Send a GET, and return the head of the answer in lower case."""
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{ACCEPT}\r\n\r\n".encode())
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        return head

    async def get(self, path: str) -> None:
        head = await self.ask(path)
        await self.reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))


async def crowd(port: int) -> None:
    pages: list[Page] = []
    running: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, *number = line.split()
        if word == "open":
            pages = [Page(port) for _ in range(int(number[0]))]
            running = [asyncio.create_task(page.run()) for page in pages]
            await _while_none_fails(asyncio.gather(*(page.is_live.wait() for page in pages)), running)
        else:
            for task in running:
                if task.done():
                    task.result()  # raises the error of a page that failed
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            running = []
        print(sum(page.pools for page in pages), flush=True)


async def _while_none_fails(all_live: asyncio.Future[Any], running: list[asyncio.Task[None]]) -> None:
    await asyncio.wait([all_live, *running], return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        if task.done():
            task.result()


def main() -> None:
    work: Coroutine[Any, Any, None] = crowd(int(sys.argv[1]))
    asyncio.run(work)


if __name__ == "__main__":
    main()
