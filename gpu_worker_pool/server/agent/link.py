"""The link between two boxes, once both have proven the key of their fleet. It is the same at both ends.

It carries messages, and calls: each end may ask the other, any number of calls at a time, and an answer comes when there is
one. A call whose caller has left is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from itertools import count
from typing import Any, Protocol

from gpu_worker_pool.host.pauses import LoopShare

from .frames import MOST_BYTES, Ask, Begun, BodyPart, CallFrame, GivenUp, decode_message, encode_message
from .handshake import ForgedFrame, Seal

# A piece of an answer waits until less than this is on its way: messages must not wait behind a long answer.
ROOM_BYTES = 256 * 1024
# The other end has this long to take what was sent before the link is closed.
CLOSE_S = 1.0
NO_LEADER = "no leader at the moment; waiting"

Headers = Iterable[tuple[str, str]]


class LinkLost(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """There is no link to the other box any more; the message says why. `leader` is where to ask instead, if a box that has
    proven the key said so. With `is_silent` nothing was heard of it; with `has_other_key` it has another key than this box.
    """

    def __init__(
        self, why: str, leader: str | None = None, *, is_silent: bool = False, has_other_key: bool = False
    ) -> None:
        super().__init__(why)
        self.has_other_key = has_other_key
        self.leader = leader
        self.is_silent = is_silent


class Socket(Protocol):
    """A WebSocket, of either library."""

    async def send(self, frame: bytes) -> None:
        """Send; waits while the other end takes nothing. LinkLost if it is closed."""

    async def receive(self) -> bytes:
        """The next frame; LinkLost if there is none."""


class LinkAnswer:
    """The answer to a call that was passed on, as it comes. `begun` fails with LinkLost if the link ends first."""

    def __init__(self, link: BoxLink, number: int) -> None:
        self.begun: asyncio.Future[Begun] = asyncio.get_running_loop().create_future()
        self.whole = b""
        self._link = link
        self._number = number
        self._parts: deque[bytes] = deque()
        self._bytes = 0
        self._has_more = asyncio.Event()
        self._is_over = False

    def take(self, frame: Begun | BodyPart, body: bytes) -> None:
        if isinstance(frame, BodyPart):
            self._parts.append(body)
            self._bytes += len(body)
            self._is_over = frame.is_last
            self._has_more.set()
            if self._bytes > MOST_BYTES:  # the caller does not read
                self.end("")
        elif not self.begun.done():
            self.whole, self._is_over = body, frame.is_whole
            self.begun.set_result(frame)

    def fail(self, why: str) -> None:
        self._is_over = True
        self._has_more.set()
        if not self.begun.done():
            self.begun.set_exception(LinkLost(why))
            self.begun.exception()  # the caller may be gone

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The pieces of the body. It ends early if the link does."""
        while True:
            while self._parts:
                part = self._parts.popleft()
                self._bytes -= len(part)
                yield part
            if self._is_over:
                return
            await self._has_more.wait()
            self._has_more.clear()

    def end(self, why: str = "the call was given up") -> None:
        """Wait for no more; tell the other end, unless all of it has come."""
        self._link.forget(self._number, is_over=self._is_over)
        self.fail(why)


class LinkReply:
    """How a call of the other end is answered. `gone` is done when its caller does not wait any more."""

    def __init__(self, link: BoxLink, number: int) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link = link
        self._number = number

    async def begin(
        self, status: int, headers: Headers = (), body: bytes = b"", *, is_whole: bool = True, keeper: str | None = None
    ) -> None:
        await self._send(Begun(self._number, status, tuple(headers), is_whole, keeper), body)

    async def go_on(self, body: bytes, *, is_last: bool) -> None:
        await self._send(BodyPart(self._number, is_last), body)

    async def _send(self, frame: CallFrame, body: bytes) -> None:
        if not self.gone.done():
            await self._link.send_when_there_is_room(frame, body)


# Answers a call, and raises nothing.
Serve = Callable[[Ask, bytes, LinkReply], Coroutine[Any, Any, None]]


class BoxLink:
    """`node` is the other end, as it has proven. `send` never waits: what is not taken in time ends the link."""

    def __init__(self, socket: Socket, seal: Seal, node: str) -> None:
        self.node = node
        self._socket = socket
        self._seal = seal
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._has_more = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._numbers = count(1)
        self._asked: dict[int, LinkAnswer] = {}
        self._served: dict[int, LinkReply] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._why_closed: str | None = None
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, message: object) -> None:
        self.tell(encode_message(message))

    def tell(self, text: str) -> None:
        """Send a message that is encoded already."""
        self._queue(text.encode())

    def ask(self, method: str, target: str, headers: Headers = (), said: str = "", body: bytes = b"") -> LinkAnswer:
        """Make a call at the other end."""
        ask = Ask(next(self._numbers), method, target, tuple(headers), said)
        answer = self._asked[ask.id] = LinkAnswer(self, ask.id)
        if self._end.done():
            self.forget(ask.id, is_over=True)
            answer.fail("the link has ended")
        else:
            self._queue(_with_body(ask, body))
        return answer

    def forget(self, number: int, *, is_over: bool) -> None:
        if self._asked.pop(number, None) is not None and not is_over and not self._end.done():
            self.send(GivenUp(number))

    async def send_when_there_is_room(self, frame: CallFrame, body: bytes) -> None:
        await self._has_room.wait()
        self._queue(_with_body(frame, body))

    def _queue(self, payload: bytes) -> None:
        self._waiting.append(payload)
        self._bytes += len(payload)
        if self._bytes > MOST_BYTES:
            self._finish("the other box does not take what it is told")
        elif self._bytes > ROOM_BYTES:
            self._has_room.clear()
        self._has_more.set()

    def close(self, why: str) -> None:
        """End the link, after what was sent, and after the calls that are served: soon, whatever becomes of them."""
        if self._why_closed is None:
            self._why_closed = why
            self._has_more.set()
            asyncio.get_running_loop().call_later(CLOSE_S, self._finish, why)

    def drop(self, why: str) -> None:
        """End the link at once: nothing is heard of the other end."""
        self._finish(why, is_silent=True)

    def _finish(self, why: str, *, is_silent: bool = False) -> None:
        if not self._end.done():
            self._end.set_exception(LinkLost(why, is_silent=is_silent))
            self._end.exception()  # it may be that nobody waits for it any more

    async def run(self, expected: Any, take: Callable[[Any], None], serve: Serve) -> None:
        """Pass messages of the `expected` classes on, answer calls, and send, until the link ends: always LinkLost."""
        tasks = [asyncio.ensure_future(self._read(expected, take, serve)), asyncio.ensure_future(self._write())]
        futures: list[asyncio.Future[Any]] = [*tasks, self._end]
        why = "the link has ended"
        try:
            done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            for future in (self._end, *tasks):
                if future in done:
                    future.result()
        except LinkLost as lost:
            why = str(lost)
            raise
        finally:
            self._finish(why)
            for reply in self._served.values():
                reply.gone.cancel()
            for task in (*tasks, *self._tasks):
                task.cancel()
            asked, self._asked = self._asked, {}
            for answer in asked.values():
                answer.fail(why)
            self._has_room.set()
            await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)

    async def _read(self, expected: Any, take: Callable[[Any], None], serve: Serve) -> None:
        share = LoopShare()
        while True:
            frame = await self._socket.receive()
            await share.yield_if_due()
            try:
                text, _, body = self._seal.open(frame).partition(b"\n")
                message = decode_message(text.decode(), expected | CallFrame)
            except ForgedFrame as forged:
                raise LinkLost(str(forged)) from None
            except ValueError as error:
                raise LinkLost(f"the other box said what this one does not understand: {str(error)!a}") from None
            match message:
                case Ask():
                    self._begin_to_serve(message, body, serve)
                case Begun() | BodyPart():
                    self._take_answer(message, body)
                case GivenUp(id=number):
                    if (reply := self._served.get(number)) is not None and not reply.gone.done():
                        reply.gone.set_result(None)
                case None:
                    pass  # the other side is newer
                case _:
                    take(message)

    def _begin_to_serve(self, ask: Ask, body: bytes, serve: Serve) -> None:
        reply = self._served[ask.id] = LinkReply(self, ask.id)
        task = asyncio.ensure_future(serve(ask, body, reply))
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._served.pop(ask.id, None)
            reply.gone.cancel()
            self._has_more.set()

        task.add_done_callback(end)

    def _take_answer(self, frame: Begun | BodyPart, body: bytes) -> None:
        answer = self._asked.get(frame.id)
        if answer is not None:
            answer.take(frame, body)
            if frame.is_whole if isinstance(frame, Begun) else frame.is_last:
                self._asked.pop(frame.id, None)

    async def _write(self) -> None:
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            while self._waiting:
                payload = self._waiting.popleft()
                self._bytes -= len(payload)
                await self._socket.send(self._seal.seal(payload))
                if self._bytes <= ROOM_BYTES:
                    self._has_room.set()
            if self._why_closed is not None and not self._served:
                raise LinkLost(self._why_closed)


def _with_body(frame: CallFrame, body: bytes) -> bytes:
    text = encode_message(frame).encode()
    return text + b"\n" + body if body else text
