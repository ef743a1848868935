"""The WebSocket at which agents reach the leader of their fleet."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.types import Receive, Scope, Send

from gpu_worker_pool.core.fleet.messages import AgentMessage, Announce, Rejected
from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.server.agent.handshake import VERSION, Challenge, FleetKey, Hello, Proof, new_nonce, other_key
from gpu_worker_pool.server.agent.message_codec import MOST_BYTES, NOT_LEADING, decode_message, encode_message

from .fleet_leader import FleetLeader

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
# Connections that have not proven the key yet.
MOST_STRANGERS = 256
_MOST_BYTES_OF_STRANGER = 4096
_MOST_REASON_BYTES = 120
POLICY = 1008
# So long an agent has to take what was told before its connection is closed.
CLOSE_S = 1.0


class _LinkRefused(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """The connection ends; the agent is told why."""

    def __init__(self, why: str, code: int = POLICY, reason: str | None = None) -> None:
        super().__init__(why)
        self.code = code
        self.reason = why if reason is None else reason


class _Gone(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """The agent has closed the connection."""


class AgentEndpoint:
    """`leader_url` says who leads, as far as this server knows, and `is_own` whether a connection is from a process of this
    server's own user on this machine.
    """

    def __init__(
        self,
        node: str,
        key: FleetKey,
        leader: FleetLeader,
        leader_url: Callable[[], str | None],
        is_own: Callable[[Scope], bool],
    ) -> None:
        self._node = node
        self._key = key
        self._leader = leader
        self._leader_url = leader_url
        self._is_own = is_own
        self._strangers = 0
        self._said: dict[str, None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        await receive()
        if self._strangers >= MOST_STRANGERS:
            await send({"type": "websocket.close"})
            return
        await send({"type": "websocket.accept"})
        connection = _AgentConnection(receive, send)
        self._strangers += 1
        is_stranger = True
        try:
            self._check_origin(scope)
            async with asyncio.timeout(HANDSHAKE_S):
                hello = await self._shake_hands(connection)
            self._strangers, is_stranger = self._strangers - 1, False
            await self._serve(connection, hello.node)
        except _LinkRefused as refused:
            await connection.refuse(refused)
        except TimeoutError:
            await connection.refuse(_LinkRefused(f"the key of the fleet was not proven within {HANDSHAKE_S:g} s"))
        except (_Gone, OSError):
            pass
        finally:
            self._strangers -= is_stranger

    def _check_origin(self, scope: Scope) -> None:
        """Without a key, only processes of this server's own user on this machine may be agents."""
        if not self._key.is_set and not self._is_own(scope):
            raise _LinkRefused(
                "this fleet has no key, so it takes only boxes of the same user on its own machine; set GPU_POOL_FLEET_KEY "
                "to the same secret on all boxes"
            )

    async def _shake_hands(self, connection: _AgentConnection) -> Hello:
        hello: Hello = await connection.read(Hello, _MOST_BYTES_OF_STRANGER)
        self._check_leads()
        challenge = Challenge(self._node, new_nonce(), VERSION)
        await connection.send(encode_message(challenge))
        proof: Proof = await connection.read(Proof, _MOST_BYTES_OF_STRANGER)
        if not self._key.is_proven(proof, "agent", hello, challenge):
            self._say(other_key(self._node, hello.node))
            raise _LinkRefused(other_key(self._node, hello.node), reason="another fleet key")
        await connection.send(encode_message(self._key.prove("leader", hello, challenge)))
        return hello

    def _say(self, what: str) -> None:
        """Log it, unless it was said lately: an agent comes again every second."""
        if what not in self._said:
            logger.error("%s", what)
            self._said[what] = None
            if len(self._said) > MOST_STRANGERS:
                del self._said[next(iter(self._said))]

    def _check_leads(self) -> None:
        if not self._leader.is_leading:
            url = self._leader_url()
            why = "it is not known who leads the fleet" if url is None else f"{url} leads the fleet"
            raise _LinkRefused(f"this box does not lead: {why}", NOT_LEADING, url or "")

    async def _serve(self, connection: _AgentConnection, node: str) -> None:
        self._check_leads()
        number = self._leader.add(connection)
        writing = asyncio.ensure_future(connection.write_all())
        reading = asyncio.ensure_future(self._read_all(connection, node, number))
        try:
            done, _ = await asyncio.wait((reading, writing, connection.end), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._leader.remove(number)
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _read_all(self, connection: _AgentConnection, node: str, number: int) -> None:
        share = LoopShare()
        while True:
            text = await connection.receive(MOST_BYTES)
            await share.yield_if_due()
            message = connection.decode(text, AgentMessage)
            if isinstance(message, Announce) and message.node != node:
                raise _LinkRefused(f"a box that proved to be {node} announced itself as {message.node}")
            if message is not None:
                self._leader.receive(number, message)


class _AgentConnection:
    """One connection. What is sent waits here until the agent takes it, up to a bound."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._waiting: deque[str] = deque()
        self._bytes = 0
        self._has_more = asyncio.Event()
        self._why_closed: str | None = None
        # Fails when the connection is to end, whatever the agent takes.
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def read(self, expected: Any, most_bytes: int) -> Any:
        return self.decode(await self.receive(most_bytes), expected)

    async def receive(self, most_bytes: int) -> str:
        frame = await self._receive()
        if frame["type"] != "websocket.receive":
            raise _Gone
        text = frame.get("text")
        if not isinstance(text, str) or len(text) > most_bytes:
            raise _LinkRefused("that is not a message of an agent")
        return text

    def decode(self, text: str, expected: Any) -> Any:
        try:
            return decode_message(text, expected)
        except ValueError as error:
            logger.warning("an agent told what this server does not understand: %s", error)
            raise _LinkRefused("the leader does not understand this box; its log says more") from None

    def tell(self, text: str) -> None:
        """Send a message, once those before it are taken."""
        self._waiting.append(text)
        self._bytes += len(text)
        if self._bytes > MOST_BYTES:
            self._end("the agent does not take what it is told")
        self._has_more.set()

    def close(self, why: str) -> None:
        """End the connection, after what was told."""
        if self._why_closed is None:
            self._why_closed = why
            self._has_more.set()
            asyncio.get_running_loop().call_later(CLOSE_S, self._end, why)

    def _end(self, why: str) -> None:
        if not self.end.done():
            self.end.set_exception(_LinkRefused(why))
            self.end.exception()  # it may be that nobody waits for it any more

    async def write_all(self) -> None:
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            while self._waiting:
                text = self._waiting.popleft()
                self._bytes -= len(text)
                await self.send(text)
            if self._why_closed is not None:
                raise _LinkRefused(self._why_closed)

    async def send(self, text: str) -> None:
        await self._send({"type": "websocket.send", "text": text})

    async def refuse(self, refused: _LinkRefused) -> None:
        """Say why, and close."""
        reason = refused.reason.encode()[:_MOST_REASON_BYTES].decode("utf-8", "ignore")
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(CLOSE_S):
                if refused.code != NOT_LEADING:
                    await self.send(encode_message(Rejected(str(refused))))
                await self._send({"type": "websocket.close", "code": refused.code, "reason": reason})
