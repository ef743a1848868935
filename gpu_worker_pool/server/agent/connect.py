"""Makes links to other boxes: to the leader, or one that may know who leads, and to a box that keeps a lease."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException

from gpu_worker_pool.core.fleet.messages import Rejected

from .frames import MOST_BYTES, MOST_BYTES_OF_STRANGER, PATH, Ask, Leads, decode_message, encode_message
from .handshake import OTHER_KEY, VERSION, FleetKey, Hello, Proof, new_nonce, other_key
from .link import BoxLink, LinkLost, LinkReply

CONNECT_S = 2.0
CLOSE_S = 0.5


class _OneAddress(open_websocket):
    """A connection to the address that was asked for, and to no other: a box may not send its agents elsewhere."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class _ClientSocket:
    """The connecting end of a WebSocket."""

    def __init__(self, plain: ClientConnection) -> None:
        self.plain = plain

    async def send(self, frame: bytes) -> None:
        try:
            await self.plain.send(frame)
        except ConnectionClosed as closed:
            raise LinkLost(_why(closed)) from None

    async def receive(self) -> bytes:
        try:
            frame = await self.plain.recv()
        except ConnectionClosed as closed:
            raise LinkLost(_why(closed)) from None
        return frame if isinstance(frame, bytes) else frame.encode()


def _why(closed: ConnectionClosed) -> str:
    reason = ascii(closed.rcvd.reason)[1:-1] if closed.rcvd is not None else ""
    return f"the leader closed the connection{f': {reason}' if reason else ''}"


@dataclass(frozen=True, slots=True)
class Connector:
    """Makes links as this node."""

    node: str
    key: FleetKey

    async def connect(self, url: str) -> tuple[BoxLink, ClientConnection]:
        """A link to the box at this URL, which has proven the key, and what is to be closed after it. LinkLost says why there is
        none.
        """
        address = f"ws{url.removeprefix('http')}{PATH}"
        try:
            async with asyncio.timeout(CONNECT_S):
                plain = await _OneAddress(
                    address,
                    max_size=MOST_BYTES_OF_STRANGER,
                    close_timeout=CLOSE_S,
                    compression=None,
                    ping_interval=None,
                    proxy=None,
                    user_agent_header=None,
                )
                try:
                    return await self._shake_hands(plain), plain
                except BaseException:
                    plain.transport.abort()
                    raise
        except InvalidStatus as error:
            status = error.response.status_code
            raise LinkLost(f"{url} takes no agents (HTTP {status}); is it a box of this fleet?") from None
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI, WebSocketException, ValueError) as error:
            is_silent = isinstance(error, TimeoutError)
            why = f"no answer within {CONNECT_S:g} s" if is_silent else str(error)
            raise LinkLost(f"the box at {url} cannot be reached ({why})", is_silent=is_silent) from None

    async def _shake_hands(self, plain: ClientConnection) -> BoxLink:
        hello = Hello(self.node, new_nonce(), VERSION)
        end = _ClientSocket(plain)
        await end.send(encode_message(hello).encode())
        challenge = await _expect(end, Hello)
        await end.send(encode_message(self.key.prove("agent", hello, challenge)).encode())
        proof = await _expect(end, Proof)
        if not self.key.is_proven(proof, "leader", hello, challenge):
            raise LinkLost(other_key(challenge.node, hello.node), has_other_key=True)
        plain.protocol.max_message_size = MOST_BYTES
        return BoxLink(end, self.key.seal("agent", hello, challenge), challenge.node)

    async def ask_box(self, url: str, target: str, body: bytes, timeout_s: float) -> bytes | None:
        """Ask the box at this URL on a link of its own; None if it does not answer in time."""
        with suppress(TimeoutError, LinkLost):
            async with asyncio.timeout(timeout_s):
                link, plain = await self.connect(url)
                running = asyncio.ensure_future(link.run(Leads, lambda _: None, _refuse))
                try:
                    answer = link.ask("POST", target, body=body)
                    await answer.begun  # it fails when the link ends
                    return answer.whole
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
                    await plain.close()
        return None


async def _refuse(ask: Ask, body: bytes, reply: LinkReply) -> None:  # noqa: ARG001 - as all others
    await reply.begin(404)


async def _expect(end: _ClientSocket, kind: type) -> Any:
    text = (await end.receive()).decode()
    message = decode_message(text, kind | Rejected)
    if isinstance(message, Rejected):
        raise LinkLost(ascii(message.why)[1:-1], has_other_key=OTHER_KEY in message.why)
    if message is None:
        raise LinkLost("the leader speaks another version of the protocol; install the same version on all boxes")
    return message
