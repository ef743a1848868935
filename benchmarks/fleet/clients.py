"""Clients of the leader in one asyncio process: those that take all GPUs, those that wait, and the one that releases."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.fleet.many_boxes import GPUS_A_BOX, MODEL

AT_ONCE = 64
# How long a client waits that is told to ask later; then ever longer.
AGAIN_S, MOST_AGAIN_S = 0.5, 8.0
OWNERS = 50
LIMIT_S = 120.0
# Each lease takes all GPUs of a box.
HELD = {"model": MODEL, "gpus": GPUS_A_BOX, "ttl_s": 3600.0}
WAITS = {**HELD, "wait_s": 300.0}
TAKES = {**HELD, "wait_s": 30.0}


# It is not sure that it leads, its connection to the leader broke, or too many calls wait for their turn.
LATER = (b"HTTP/1.1 503", b"HTTP/1.1 502", b"HTTP/1.1 429")


class AskLater(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """The server says that the same call may be made again."""


class Client(asyncio.Protocol):
    """One keep-alive connection, with one call at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._answered: asyncio.Future[tuple[float, Any]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not is_whole(self._received) or self._answered is None or self._answered.done():
            return
        received, self._received = self._received, b""
        if received.startswith(b"HTTP/1.1 20"):
            self._answered.set_result((time.monotonic(), json.loads(received[received.index(b"\r\n\r\n") :])))
        else:
            is_later = received.startswith(LATER)
            self._answered.set_exception(AskLater() if is_later else AssertionError(received))

    def call(self, method: str, path: str, body: object = None) -> asyncio.Future[tuple[float, Any]]:
        """Send a call; return when it was answered, and the answer."""
        self._answered = asyncio.get_running_loop().create_future()
        sent = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._transport.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
        return self._answered

    async def call_until_answered(self, method: str, path: str, body: object = None) -> tuple[float, Any]:
        """Send a call, and again if the server says so, as every client does."""
        again_s = AGAIN_S
        while True:
            try:
                return await self.call(method, path, body)
            except AskLater:
                await asyncio.sleep(again_s * random.uniform(0.5, 1.0))
                again_s = min(2 * again_s, MOST_AGAIN_S)

    def close(self) -> None:
        self._transport.close()


def is_whole(received: bytes) -> bool:
    """Return whether this is a whole answer."""
    head, separator, body = received.partition(b"\r\n\r\n")
    return bool(separator) and len(body) >= int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])


async def connected(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


def lease(name: str) -> str:
    return f"/fleet/leases/{name}"


def box_of(answer: dict[str, Any]) -> str:
    return str(answer["gpus"][0]["node"])


async def take_all(port: int, number: int) -> dict[str, str]:
    """Take all GPUs of this number of boxes; return the lease of each box."""
    held: dict[str, str] = {}
    numbers = iter(range(number))

    async def take() -> None:
        client = await connected(port)
        for each in numbers:
            form = {**TAKES, "owner": f"owner-{each % OWNERS}"}
            _, answer = await client.call_until_answered("PUT", lease(f"held-{each}"), form)
            # It waits only if the leader changes meanwhile, or a box has lost it.
            while answer["state"] != "active":
                _, answer = await client.call_until_answered("GET", f"{lease(f'held-{each}')}?wait_s=25")
            held[box_of(answer)] = f"held-{each}"
        client.close()

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(take() for _ in range(AT_ONCE)))
    return held


class Waiters:
    """Clients that each wait for a box on a connection of their own. `granted` is the time at which one was told, by box."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.granted: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._told: Callable[[], None] = lambda: None

    async def start(self, number: int) -> None:
        room = asyncio.Semaphore(AT_ONCE)
        releaser = await connected(self._port)
        for each in range(number):
            async with room:
                client = await connected(self._port)
            self._tasks.append(asyncio.ensure_future(self._wait(client, f"waits-{each}", each % OWNERS)))
            if each % AT_ONCE == 0 and each:
                await self._until_queued(releaser, f"waits-{each - AT_ONCE}")
        await self._until_queued(releaser, f"waits-{number - 1}")
        releaser.close()

    async def _until_queued(self, client: Client, name: str) -> None:
        """Wait until the leader has this request, so that it never has too many new ones."""
        while True:
            try:
                await client.call("GET", lease(name))
            except (AssertionError, AskLater):
                await asyncio.sleep(0.01)
            else:
                return

    async def _wait(self, client: Client, name: str, owner: int) -> None:
        while True:
            at, answer = await client.call_until_answered("PUT", lease(name), {**WAITS, "owner": f"owner-{owner}"})
            if answer["state"] == "active":
                self.granted[box_of(answer)] = at
                self._told()
                return

    async def hand_overs_s(self, held: dict[str, str], boxes: Sequence[str], every_s: float) -> list[float]:
        """Release these boxes, one after each pause of this number of seconds; return how long each hand-over took."""
        client = await connected(self._port)
        released: dict[str, float] = {}
        has_news = asyncio.Event()
        self._told = has_news.set
        async with asyncio.timeout(LIMIT_S):
            began = time.monotonic()
            for number, box in enumerate(boxes):
                await asyncio.sleep(began + number * every_s - time.monotonic())
                released[box] = time.monotonic()
                await client.call_until_answered("DELETE", lease(held[box]))
            while not all(box in self.granted for box in boxes):
                has_news.clear()
                await has_news.wait()
        client.close()
        return [self.granted[box] - at for box, at in released.items()]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
