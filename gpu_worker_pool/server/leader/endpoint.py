"""The WebSocket at which other boxes of the fleet reach this one: agents their leader, and each box any other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from time import monotonic
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from gpu_worker_pool.core.fleet.messages import AgentMessage, Announce, Rejected
from gpu_worker_pool.server.agent.frames import (
    MOST_BYTES,
    MOST_BYTES_OF_STRANGER,
    Ask,
    Leads,
    decode_message,
    encode_message,
)
from gpu_worker_pool.server.agent.handshake import VERSION, FleetKey, Hello, Proof, new_nonce, other_key
from gpu_worker_pool.server.agent.link import CLOSE_S, BoxLink, LinkLost, LinkReply, Serve

from .fleet_leader import FleetLeader

logger = logging.getLogger(__name__)

# uvicorn and websockets note each connection at the level of information.
_QUIET = logging.getLogger("uvicorn.error.link")
_QUIET.setLevel(logging.WARNING)
# The key of the scope under which is what lets frames be larger, once the key is proven.
TRUST = "gpu_pool.trust"
HANDSHAKE_S = 5.0
# Connections that have not proven the key yet.
MOST_STRANGERS = 256
# A box that has proven the key and announces nothing asks one question.
UNANNOUNCED_S = 10.0
# So often the log says what strangers try: a stranger can try again at once.
SAY_EVERY_S = 10.0
_MOST_REASON_BYTES = 120
POLICY = 1008

# Answers a call that the box of this node passes on.
PassedOn = Callable[[str, Ask, bytes, LinkReply], Any]


class LinkProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, which takes small frames until the key is proven. Strangers leave no line in the log."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = self.conn.logger = _QUIET

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            self.scope[TRUST] = self._trust  # type: ignore[literal-required]

    def _trust(self) -> None:
        self.conn.max_message_size = MOST_BYTES


class _StrangerRefused(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """A stranger is refused; it is told why. `logged` is said in the log, for the operator."""

    def __init__(self, why: str, logged: str | None = None) -> None:
        super().__init__(why)
        self.logged = logged


class AgentEndpoint:
    """`leader_url` says who leads, as far as this server knows. `serve` answers what another box asks of this box, and `pass_on`
    the calls of callers that an agent passes on to its leader.
    """

    def __init__(
        self,
        node: str,
        key: FleetKey,
        leader: FleetLeader,
        leader_url: Callable[[], str | None],
        *,
        serve: Serve,
        pass_on: PassedOn,
    ) -> None:
        self._node = node
        self._key = key
        self._leader = leader
        self._leader_url = leader_url
        self._serve_box = serve
        self._pass_on = pass_on
        self._strangers = 0
        self._said_at = -SAY_EVERY_S
        self._unsaid = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        await receive()
        if self._strangers >= MOST_STRANGERS:
            await send({"type": "websocket.close"})
            return
        await send({"type": "websocket.accept"})
        socket = _ServerSocket(receive, send)
        self._strangers += 1
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                hello, challenge = await self._shake_hands(socket)
        except _StrangerRefused as refused:
            self._say(refused.logged)
            await socket.refuse(str(refused))
            return
        except TimeoutError:
            await socket.refuse(f"the key of the fleet was not proven within {HANDSHAKE_S:g} s")
            return
        except (LinkLost, OSError):
            return
        finally:
            self._strangers -= 1
        scope.get(TRUST, lambda: None)()
        link = BoxLink(socket, self._key.seal("leader", hello, challenge), hello.node)
        try:
            await self._serve(link, hello.node)
        except LinkLost as lost:
            logger.info("the link of %s has ended: %s", hello.node, lost)
            await socket.close(str(lost))

    async def _shake_hands(self, socket: _ServerSocket) -> tuple[Hello, Hello]:
        hello: Hello = await socket.expect(Hello)
        challenge = Hello(self._node, new_nonce(), VERSION)
        await socket.send(encode_message(challenge).encode())
        proof: Proof = await socket.expect(Proof)
        if not self._key.is_proven(proof, "agent", hello, challenge):
            why = other_key(self._node, hello.node)
            raise _StrangerRefused(why, why)
        await socket.send(encode_message(self._key.prove("leader", hello, challenge)).encode())
        return hello, challenge

    def _say(self, what: str | None) -> None:
        """Log it, unless something like it was said lately."""
        if what is None:
            return
        if monotonic() < self._said_at + SAY_EVERY_S:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more attempts that were refused)" if self._unsaid else ""
        logger.error("%s%s", what, more)
        self._said_at, self._unsaid = monotonic(), 0

    async def _serve(self, link: BoxLink, node: str) -> None:
        """Serve a box that has proven the key, until its link ends: always LinkLost."""
        number: int | None = None
        unannounced = asyncio.get_running_loop().call_later(UNANNOUNCED_S, link.close, "it has announced nothing")

        def take(message: AgentMessage) -> None:
            nonlocal number
            if number is None and not self._leader.is_leading:
                link.send(Leads(self._leader_url()))
                return
            if isinstance(message, Announce) and message.node != node:
                link.send(Rejected(why := f"a box that proved to be {node} announced itself as {message.node!a}"))
                link.close(why)
                return
            unannounced.cancel()
            if number is None:
                number = self._leader.add(link)
            self._leader.receive(number, message)

        async def serve(ask: Ask, body: bytes, reply: LinkReply) -> None:
            if number is None:
                await self._serve_box(ask, body, reply)
            else:
                await self._pass_on(node, ask, body, reply)

        try:
            await link.run(AgentMessage, take, serve)
        finally:
            unannounced.cancel()
            if number is not None:
                self._leader.remove(number)


class _ServerSocket:
    """The accepting end of a WebSocket."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send

    async def receive(self) -> bytes:
        frame = await self._receive()
        if frame["type"] != "websocket.receive":
            raise LinkLost("the other box closed the connection")
        body: bytes | None = frame.get("bytes")
        if body is None:
            raise LinkLost("the other box sent text, and frames are bytes")
        return body

    async def send(self, frame: bytes) -> None:
        try:
            await self._send({"type": "websocket.send", "bytes": frame})
        except (OSError, RuntimeError):  # uvicorn says so of a connection that is closed
            raise LinkLost("the other box closed the connection") from None

    async def expect(self, kind: type) -> Any:
        """The next frame of a stranger."""
        frame = await self.receive()
        with suppress(ValueError):
            if len(frame) <= MOST_BYTES_OF_STRANGER and (message := decode_message(frame.decode(), kind)) is not None:
                return message
        raise _StrangerRefused("that is not a message of a box of this version")

    async def refuse(self, why: str) -> None:
        """Say why, and close."""
        with suppress(LinkLost, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.send(encode_message(Rejected(why)).encode())
        await self.close("refused")

    async def close(self, why: str) -> None:
        reason = why.encode()[:_MOST_REASON_BYTES].decode("utf-8", "ignore")
        with suppress(OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._send({"type": "websocket.close", "code": POLICY, "reason": reason})
