"""Makes links to other boxes: to the leader, to a box that may know who leads, and to one that keeps a lease."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException

from gpu_worker_pool.core.fleet.messages import Rejected
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.connections import UserNotKnown, uid_of_server

from .frames import MOST_BYTES, MOST_BYTES_OF_STRANGER, PATH, Ask, Leads, WhoLeads, decode_message, encode_message
from .handshake import OTHER_KEY, VERSION, Challenge, FleetKey, Hello, Proof, new_nonce, other_key
from .leader_search import LeaderSearch
from .link import BoxLink, LinkLost, LinkReply

_T = TypeVar("_T")
ASK_S = 2.0
CONNECT_S = 3.0
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
        if not self.key.is_set and not _is_own(plain.transport.get_extra_info("socket")):
            raise LinkLost("another user listens there, and this fleet has no key to tell its boxes by")
        hello = Hello(self.node, new_nonce(), VERSION)
        end = _ClientSocket(plain)
        await end.send(encode_message(hello).encode())
        challenge = await _expect(end, Challenge)
        await end.send(encode_message(self.key.prove("agent", hello, challenge)).encode())
        proof = await _expect(end, Proof)
        if not self.key.is_proven(proof, "leader", hello, challenge):
            raise LinkLost(other_key(challenge.node, hello.node), has_other_key=True)
        plain.protocol.max_message_size = MOST_BYTES
        return BoxLink(end, self.key.seal("agent", hello, challenge))

    async def ask_who_leads(self, urls: Sequence[str], search: LeaderSearch) -> None:
        """Ask all of them at once, until one names a leader that can be tried."""
        asking = [asyncio.ensure_future(self._ask(url, search)) for url in urls]
        try:
            for answer in asyncio.as_completed(asking):
                if await answer:
                    return
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, url: str, search: LeaderSearch) -> bool:
        try:
            async with asyncio.timeout(ASK_S):
                leader = await self._leader_by(url)
        except TimeoutError:
            search.silent(url, f"not within {ASK_S:g} s")
        except LinkLost as lost:
            search.silent(url, str(lost))
        else:
            return search.told(url, leader, boot_time())
        return False

    async def _leader_by(self, url: str) -> str | None:
        """The leader that this box names, after it has proven the key."""
        said: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        async def ask(link: BoxLink) -> str | None:
            link.send(WhoLeads())
            return await said

        def take(message: Leads) -> None:
            if not said.done():
                said.set_result(message.url)

        return await self._while_linked(url, ask, Leads, take)

    async def ask_box(self, url: str, target: str, body: bytes, timeout_s: float) -> bytes | None:
        """Ask the box at this URL on a link of its own; None if it does not answer in time."""

        async def ask(link: BoxLink) -> bytes:
            answer = link.ask("POST", target, body=body)
            await answer.begun
            return answer.whole

        with suppress(TimeoutError, LinkLost):
            async with asyncio.timeout(timeout_s):
                return await self._while_linked(url, ask, Leads, lambda _: None)
        return None

    async def _while_linked(
        self, url: str, ask: Callable[[BoxLink], Coroutine[Any, Any, _T]], expected: Any, take: Callable[[Any], None]
    ) -> _T:
        link, plain = await self.connect(url)
        running = asyncio.ensure_future(link.run(expected, take, _refuse))
        asking = asyncio.ensure_future(ask(link))
        try:
            await asyncio.wait((running, asking), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                await running  # it says why the link has ended
            return await asking
        finally:
            for task in (asking, running):
                task.cancel()
            await asyncio.gather(asking, running, return_exceptions=True)
            await plain.close()


def _is_own(connected: socket.socket) -> bool:
    """Whether a server of this process's own user, or of root, is at the other end. Another user may listen at a free port."""
    try:
        return uid_of_server(connected) in {None, 0, os.geteuid()}
    except UserNotKnown:
        return False


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
