"""GET /peers: the other servers, polled in the background while this is called."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple

from pydantic_core import from_json

from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.response import Response, encode, encode_with
from gpu_worker_pool.urls import EndpointUrl, parse_endpoint, split_endpoints, unique_endpoints
from gpu_worker_pool.wire.pool import PeersView, PeerView, PoolView
from gpu_worker_pool.wire.reader import read
from gpu_worker_pool.wire.transport import CallFailed, Reply, Transport

logger = logging.getLogger(__name__)

# Each may answer with megabytes, and all are asked at the same time.
MOST_PEERS = 64
ASK_EVERY_S = 2.0
ANSWER_WITHIN_S = 3.0
MOST_BYTES = 2 * 1024 * 1024
MOST_QUEUED = 200
MOST_LEASES = 500
# The peers are polled for so long after the last call of /peers.
WANTED_S = 30.0
# The last pool of a peer that does not answer is shown for so long.
KEPT_S = 60.0
# The first call waits so long for the peers' answers.
FIRST_ANSWERS_S = 1.0
MAX_ERROR_LENGTH = 300


class Peer:
    """One peer and its last answer. `is_up` is None until the peer has been asked since the polling started."""

    def __init__(self, url: EndpointUrl) -> None:
        self.url = url.url
        self.node: str | None = None
        self.server_id: str | None = None
        self.is_up: bool | None = None
        self.error: str | None = None
        self.pool: bytes | None = None
        self.answered_at: float | None = None
        self.was_asked = asyncio.Event()

    def reset(self) -> None:
        """Forget whether the peer is up, and keep its last pool."""
        self.is_up, self.error = None, None
        self.was_asked = asyncio.Event()

    def answered(self, pool: PeerPool, now: float) -> None:
        self.pool, self.node, self.server_id = pool
        self.is_up, self.error, self.answered_at = True, None, now

    def failed(self, why: str) -> None:
        """Note that the peer is down; its last pool is kept for a while."""
        self.is_up, self.error = False, why[:MAX_ERROR_LENGTH]

    def encode(self, now: float) -> bytes:
        age_s = None if self.answered_at is None else max(now - self.answered_at, 0.0)
        if age_s is None or age_s > KEPT_S:
            self.pool = None
        shown_s = None if age_s is None else round(age_s, 3)
        view = PeerView(url=self.url, node=self.node, is_up=self.is_up, error=self.error, age_s=shown_s, pool=None)
        return encode(view).removesuffix(b"null}") + (self.pool or b"null") + b"}"


class PeerCalls:
    """All peers. They are polled only while /peers is called; `own_id` is this server's id, which may be among theirs."""

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
        self._wanted_at = -WANTED_S
        self._polling: asyncio.Task[None] | None = None

    def handlers(self) -> Handlers:
        return {"peers": self.show}

    async def show(self, call: Call) -> Response:
        """The last answer of each peer. Nothing of the call is passed on to them."""
        call.query()
        return Response(200, await self.encoded())

    async def encoded(self) -> bytes:
        """The last answer of each peer. Calling this keeps the polling of the peers going."""
        if self.peers:
            await self.ensure_polling()
        return self.encode()

    async def ensure_polling(self) -> None:
        """Start or continue the polling; return when all peers were asked, or soon."""
        self._wanted_at = self._clock()
        if self._polling is None:
            for peer in self.peers:
                peer.reset()
            self._polling = asyncio.create_task(self._poll_all())
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWERS_S):
                for peer in self.peers:
                    await peer.was_asked.wait()

    def encode(self) -> bytes:
        """Encode the peers, without this server itself."""
        now = self._clock()
        others = [peer.encode(now) for peer in self.peers if peer.server_id != self._own_id]
        return encode_with(PeersView(peers=()), peers=others)

    async def close(self) -> None:
        if (polling := self._polling) is not None:
            polling.cancel()
            await asyncio.wait([polling])

    async def _poll_all(self) -> None:
        async with Transport(max_bytes=MOST_BYTES, uses_sockets=False) as transport:
            # Each has a task of its own: a peer that hangs delays no other.
            tasks = [asyncio.create_task(self._poll(transport, peer)) for peer in self.peers]
            stopped: set[asyncio.Task[None]] = set()
            try:
                while self._clock() - self._wanted_at < WANTED_S and not stopped:
                    stopped, _ = await asyncio.wait(tasks, timeout=self._every_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                # From here on the next call of /peers starts the polling again.
                if self._polling is asyncio.current_task():
                    self._polling = None
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for task in stopped:
                task.result()  # a task ends only by a fault of ours, which must be logged

    async def _poll(self, transport: Transport, peer: Peer) -> None:
        while True:
            try:
                url = f"{peer.url}/pool?queue={MOST_QUEUED}&leases={MOST_LEASES}"
                reply = await transport.call("GET", url, timeout_s=ANSWER_WITHIN_S, is_parsed=False)
                peer.answered(await asyncio.to_thread(read_pool, reply), self._clock())
            except CallFailed as error:
                peer.failed(str(error))
            peer.was_asked.set()
            await asyncio.sleep(self._every_s)


class PeerPool(NamedTuple):
    body: bytes
    node: str | None
    server_id: str | None


def read_pool(reply: Reply) -> PeerPool:
    """Read a peer's answer, with at most so many of its queue; CallFailed if it is not a pool."""
    if reply.status != HTTPStatus.OK:
        raise CallFailed(f"it answers with status {reply.status}; is this a GPU server with leases?")
    try:
        pool = from_json(reply.body, allow_inf_nan=False)
    except ValueError:
        raise CallFailed("its answer is not JSON; is this a GPU server?") from None
    view = read(PoolView, pool)
    if view is None:
        raise CallFailed("its answer is not a pool; is this a GPU server?")
    if isinstance(queue := pool.get("queue"), list):
        pool["queue"] = queue[:MOST_QUEUED]
    return PeerPool(encode(pool), view.node, view.server_id)


def parse_peers(text: str | None) -> list[EndpointUrl]:
    """Parse URLs from a text with commas, without duplicates; an invalid one is logged and left out."""
    found = []
    for part in split_endpoints(text or ""):
        try:
            found.append(parse_endpoint(part))
        except ValueError as error:
            logger.error("GPU_POOL_PEERS: %s; it is left out", error)  # noqa: TRY400
    found = unique_endpoints(found)
    if len(found) > MOST_PEERS:
        logger.error("GPU_POOL_PEERS: of %d peers only the first %d are asked", len(found), MOST_PEERS)
    return found[:MOST_PEERS]
