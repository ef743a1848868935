"""The other servers of a fleet, asked in the background while somebody looks at them.

This module loads an HTTP client, so it is imported only where there are peers.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from pydantic_core import from_json

from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.urls import EndpointUrl

from .authority.snapshot import encode

ASK_EVERY_S = 2.0
ANSWER_WITHIN_S = 3.0
MOST_BYTES = 2 * 1024 * 1024
MOST_QUEUED = 200
# So long after the last call of /peers they are asked no more.
LOOKED_AT_S = 30.0
# So long the last pool of one that does not answer is shown.
KEPT_S = 60.0
# The first call waits so long for those who answer soon.
FIRST_ANSWERS_S = 1.0
MOST_WORDS = 300


class PeerFailed(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """There is no answer, or none that is a pool."""


class Peer:
    """One of them, and what is known of it: `is_up` is None until it has been asked since somebody began to look."""

    def __init__(self, url: EndpointUrl) -> None:
        self.url = url.url
        self.node: str | None = None
        self.server_id: str | None = None
        self.is_up: bool | None = None
        self.error: str | None = None
        self.pool: bytes | None = None
        self.answered_at: float | None = None
        self.was_asked = asyncio.Event()

    def begin_anew(self) -> None:
        """What it said stays for a while; whether it is up has to be found out again."""
        self.is_up, self.error = None, None
        self.was_asked = asyncio.Event()

    def answered(self, pool: dict[str, Any], encoded: bytes, now: float) -> None:
        """Its pool as it is now."""
        node, server_id = pool.get("node"), pool.get("server_id")
        self.node = node if isinstance(node, str) else None
        self.server_id = server_id if isinstance(server_id, str) else None
        self.is_up, self.error, self.pool, self.answered_at = True, None, encoded, now

    def failed(self, why: str) -> None:
        """It is down, or as good as that; its last pool is kept for a while."""
        self.is_up, self.error = False, why[:MOST_WORDS]

    def encode(self, now: float) -> bytes:
        """As the answer shows it."""
        age_s = None if self.answered_at is None else max(now - self.answered_at, 0.0)
        if age_s is None or age_s > KEPT_S:
            self.pool = None
        shown = encode(
            {
                "url": self.url,
                "node": self.node,
                "is_up": self.is_up,
                "error": self.error,
                "age_s": None if age_s is None else round(age_s, 3),
            }
        )
        return b'%b,"pool":%b}' % (shown[:-1], self.pool or b"null")


class Peers:
    """All of them. Nobody is asked while nobody looks; `own_id` is this server's id, which may be among them."""

    def __init__(
        self,
        urls: Sequence[EndpointUrl],
        *,
        own_id: str,
        clock: Callable[[], float] = boot_time,
        every_s: float = ASK_EVERY_S,
    ) -> None:
        self.peers = [Peer(url) for url in urls]
        self._own_id = own_id
        self._clock = clock
        self._every_s = every_s
        self._looked_at = -LOOKED_AT_S
        self._asking: asyncio.Task[None] | None = None

    @property
    def is_looked_at(self) -> bool:
        """Whether somebody wanted to know lately."""
        return self._clock() - self._looked_at < LOOKED_AT_S

    async def look(self) -> None:
        """Somebody wants to know: see to it that all are asked. Returns when they were, or soon."""
        self._looked_at = self._clock()
        if self._asking is None:
            for peer in self.peers:
                peer.begin_anew()
            self._asking = asyncio.create_task(self._ask_all())
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWERS_S):
                for peer in self.peers:
                    await peer.was_asked.wait()

    def encode(self) -> bytes:
        """The answer, without this server itself."""
        now = self._clock()
        others = [peer.encode(now) for peer in self.peers if peer.server_id != self._own_id]
        return b'{"peers":[%b]}' % b",".join(others)

    async def close(self) -> None:
        """Ask nobody any more."""
        asking = self._asking
        if asking is not None:
            asking.cancel()
            await asyncio.wait([asking])

    async def _ask_all(self) -> None:
        # No cookies, no proxy of the environment, no compression: two megabytes may hold gigabytes.
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, resolver=_Resolver()),
            headers={"User-Agent": "gpu-worker-pool", "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        ) as session:
            # Each at its own pace: one that hangs delays no other.
            asking = [asyncio.create_task(self._ask_again_and_again(session, peer)) for peer in self.peers]
            stopped: set[asyncio.Task[None]] = set()
            try:
                while self.is_looked_at and not stopped:
                    stopped, _ = await asyncio.wait(asking, timeout=self._every_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                # From here on whoever looks begins anew.
                if self._asking is asyncio.current_task():
                    self._asking = None
                for task in asking:
                    task.cancel()
                await asyncio.wait(asking)
            for task in stopped:
                task.result()  # they stop for a fault of their own only, which belongs into the log

    async def _ask_again_and_again(self, session: aiohttp.ClientSession, peer: Peer) -> None:
        while True:
            try:
                body = await _fetch(session, f"{peer.url}/pool?queue={MOST_QUEUED}")
                pool, encoded = await asyncio.to_thread(read_pool, body)
                peer.answered(pool, encoded, self._clock())
            except PeerFailed as error:
                peer.failed(str(error))
            peer.was_asked.set()
            await asyncio.sleep(self._every_s)


def read_pool(body: bytes) -> tuple[dict[str, Any], bytes]:
    """A pool as it was answered, with at most so many of its queue, and as it is shown; PeerFailed where it is none."""
    try:
        pool = from_json(body, allow_inf_nan=False)
    except ValueError:
        raise PeerFailed("its answer is not JSON; is this a GPU server?") from None
    if not isinstance(pool, dict) or not isinstance(pool.get("gpus"), list):
        raise PeerFailed("its answer is no pool; is this a GPU server?")
    queue = pool.get("queue")
    if isinstance(queue, list):
        pool["queue"] = queue[:MOST_QUEUED]
    return pool, encode(pool)


async def _fetch(session: aiohttp.ClientSession, url: str) -> bytes:
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S), session.get(url, allow_redirects=False) as response:
            if 300 <= response.status < 400:
                raise PeerFailed(
                    f"it redirects (status {response.status}), which is not followed; give the address it leads to"
                )
            if response.status != 200:
                raise PeerFailed(f"it answers with status {response.status}; is this a GPU server with leases?")
            return await _read(response)
    except TimeoutError:
        raise PeerFailed(f"no answer within {ANSWER_WITHIN_S:g} s") from None
    except aiohttp.ClientSSLError as error:
        raise PeerFailed(str(error)) from None
    except aiohttp.ClientConnectorError as error:
        raise PeerFailed(f"cannot connect: {_in_words(error.os_error)}") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise PeerFailed(str(error) or type(error).__name__) from None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MOST_BYTES:
            response.close()
            raise PeerFailed(f"its answer is larger than {MOST_BYTES // (1024 * 1024)} MiB")
    return bytes(body)


def _in_words(error: OSError) -> str:
    """As the system says it; where a name was not found its number is none of the system's, and the text says it."""
    number = error.errno
    return os.strerror(number) if number is not None and number > 0 else error.strerror or str(error)


class _Resolver(AbstractResolver):
    """Looks names up in threads that nobody waits for.

    A name server that hangs would otherwise take the threads that the journal is read in, and keep the server from
    stopping. The connector looks up each name once at a time, so there are never more threads than names.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[ResolveResult]] = loop.create_future()

        def look_up() -> None:
            try:
                answers = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                outcome: list[ResolveResult] | OSError = error if isinstance(error, OSError) else OSError(str(error))
            else:
                outcome = [
                    ResolveResult(
                        hostname=host,
                        host=str(address[0]),
                        port=int(address[1]),
                        family=kind,
                        proto=protocol,
                        flags=socket.AI_NUMERICHOST,
                    )
                    for kind, _, protocol, _, address in answers
                ]
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(tell, outcome)

        def tell(outcome: list[ResolveResult] | OSError) -> None:
            if found.done():
                return
            if isinstance(outcome, OSError):
                found.set_exception(outcome)
            else:
                found.set_result(outcome)

        Thread(target=look_up, name="peer-names", daemon=True).start()
        return await found

    async def close(self) -> None:
        """Nothing is kept."""
