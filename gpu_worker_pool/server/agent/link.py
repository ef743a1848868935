"""The connection of a box to its leader: boxes are asked who leads, and one WebSocket to the leader begins with the proof of the
fleet's key on both sides.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from gpu_worker_pool.core.fleet.messages import AgentMessage, LeaderMessage, Rejected
from gpu_worker_pool.host.clock import boot_time

from .handshake import OTHER_KEY, Challenge, FleetKey, Hello, Proof, new_nonce, other_key
from .leader_search import LeaderSearch
from .message_codec import MOST_BYTES, NOT_LEADING, PATH, decode_message, encode_message

ASK_S = 2.0
_MOST_HEALTH_BYTES = 64 * 1024
CONNECT_S = 3.0
CLOSE_S = 0.5


class LinkLost(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """There is no connection to the leader any more; the message says why. `leader` is whom to ask instead, if known. With
    `is_silent` nothing was heard of it; with `has_other_key` it leads, and has another key than this box.
    """

    def __init__(
        self, why: str, leader: str | None = None, *, is_silent: bool = False, has_other_key: bool = False
    ) -> None:
        super().__init__(why)
        self.has_other_key = has_other_key
        self.leader = leader
        self.is_silent = is_silent


class LeaderLink:
    """One connection. `send` never waits: what is not taken in time ends the connection."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._waiting: deque[str] = deque()
        self._bytes = 0
        self._has_more = asyncio.Event()
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def send(self, message: AgentMessage) -> None:
        text = encode_message(message)
        self._waiting.append(text)
        self._bytes += len(text)
        if self._bytes > MOST_BYTES:
            self.close("the leader does not take what this box tells")
        self._has_more.set()

    def close(self, why: str) -> None:
        if not self._end.done():
            self._end.set_result(why)

    async def run(self, take: Callable[[LeaderMessage], None]) -> None:
        """Pass the leader's messages on, and send, until the connection ends: always LinkLost."""
        tasks = [asyncio.ensure_future(self._read(take)), asyncio.ensure_future(self._write())]
        futures: list[asyncio.Future[Any]] = [*tasks, self._end]
        try:
            done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if self._end in done:
                raise LinkLost(self._end.result(), is_silent=True)
            for future in done:
                future.result()
        except (aiohttp.ClientError, OSError) as error:
            raise LinkLost(f"the connection to the leader broke ({error})") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, take: Callable[[LeaderMessage], None]) -> None:
        while True:
            message = await read_message(self._socket, LeaderMessage)
            if message is not None:
                take(message)

    async def _write(self) -> None:
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            while self._waiting:
                text = self._waiting.popleft()
                self._bytes -= len(text)
                await self._socket.send_str(text)


async def read_message(socket: aiohttp.ClientWebSocketResponse, expected: Any) -> Any:
    """The next message; None if its kind is not known. LinkLost if there is none."""
    frame = await socket.receive()
    if frame.type is aiohttp.WSMsgType.TEXT:
        try:
            return decode_message(frame.data, expected)
        except ValueError as error:
            raise LinkLost(f"the leader told what this box does not understand: {error}") from None
    code = socket.close_code
    reason = str(frame.extra or "") if frame.type is aiohttp.WSMsgType.CLOSE else ""
    if code == NOT_LEADING:
        raise LinkLost(f"that box does not lead{f'; {reason} does' if reason else ''}", reason or None)
    if frame.type is aiohttp.WSMsgType.ERROR:
        raise LinkLost(f"the connection to the leader broke ({socket.exception()})")
    raise LinkLost(f"the leader closed the connection{f': {reason}' if reason else ''}")


async def connect(
    session: aiohttp.ClientSession, url: str, node: str, version: str, key: FleetKey
) -> aiohttp.ClientWebSocketResponse:
    """Connect to the leader at this URL, and prove the key on both sides. LinkLost says why that failed."""
    timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
    try:
        async with asyncio.timeout(CONNECT_S):
            socket = await session.ws_connect(
                f"{url}{PATH}", timeout=timeout, max_msg_size=MOST_BYTES, autoping=True, compress=0
            )
            try:
                await _shake_hands(socket, Hello(node, new_nonce(), version), key)
            except BaseException:
                await socket.close()
                raise
    except aiohttp.WSServerHandshakeError as error:
        raise LinkLost(f"{url} takes no agents (HTTP {error.status}); is it a box of this fleet?") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why = f"no answer within {CONNECT_S:g} s" if isinstance(error, TimeoutError) else str(error)
        is_silent = isinstance(error, TimeoutError)
        raise LinkLost(f"the leader at {url} cannot be reached ({why})", is_silent=is_silent) from None
    return socket


async def _shake_hands(socket: aiohttp.ClientWebSocketResponse, hello: Hello, key: FleetKey) -> None:
    await socket.send_str(encode_message(hello))
    challenge = await _expect(socket, Challenge)
    await socket.send_str(encode_message(key.prove("agent", hello, challenge)))
    proof = await _expect(socket, Proof)
    if not key.is_proven(proof, "leader", hello, challenge):
        raise LinkLost(other_key(challenge.node, hello.node), has_other_key=True)


async def _expect(socket: aiohttp.ClientWebSocketResponse, kind: type) -> Any:
    message = await read_message(socket, kind | Rejected)
    if isinstance(message, Rejected):
        raise LinkLost(message.why, has_other_key=OTHER_KEY in message.why)
    if message is None:
        raise LinkLost("the leader speaks another version of the protocol; install the same version on all boxes")
    return message


async def ask_who_leads(session: aiohttp.ClientSession, urls: Sequence[str], search: LeaderSearch) -> None:
    """Ask all of them at once, until one names a leader that can be tried."""
    asking = [asyncio.ensure_future(_ask(session, url, search)) for url in urls]
    try:
        for answer in asyncio.as_completed(asking):
            if await answer:
                return
    finally:
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer; a ValueError if it is too long. It may come without a length, and compressed."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > _MOST_HEALTH_BYTES:
            raise ValueError(f"its answer is longer than {_MOST_HEALTH_BYTES} bytes")
    return bytes(body)


async def _ask(session: aiohttp.ClientSession, url: str, search: LeaderSearch) -> bool:
    try:
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        async with session.get(f"{url}/health", timeout=timeout, allow_redirects=False) as answer:
            health = json.loads(await _body(answer))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError) as error:
        why = f"not within {ASK_S:g} s" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        search.silent(url, why)
        return False
    fleet = health.get("fleet") if isinstance(health, dict) else None
    if not isinstance(fleet, dict):
        search.silent(url, "it is not a box of a fleet")
        return False
    leader = str(fleet.get("leader_url"))
    return search.told(url, leader if leader.startswith(("http://", "https://")) else None, boot_time())
