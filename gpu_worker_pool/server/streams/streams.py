"""GET /events: an open connection that reports events, or only that there were some (Server-Sent Events)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Receive

from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.snapshot import Snapshot
from gpu_worker_pool.server.http.call import Call, Handlers, until_gone
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import Headers, Response
from gpu_worker_pool.wire.routes import EVENTS, PACE_S

from .changes import ChangeStream
from .events import EventStream
from .listener import Listener

MAX_STREAMS = 256
MAX_STREAMS_OF_ONE_CALLER = 64
HEADERS: Headers = (
    (b"content-type", EVENTS.encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class Streams:
    def __init__(self, pool: Pool) -> None:
        self._events = EventStream(pool)
        self._changes = ChangeStream(pool)
        self._open: dict[Listener, str] = {}
        self._is_closed = False

    def note_snapshot(self, snapshot: Snapshot) -> None:
        self._events.note_snapshot(snapshot)
        self._changes.note_snapshot(snapshot)

    def close(self) -> None:
        self._is_closed = True
        for listener in self._open:
            listener.end()

    def handlers(self) -> Handlers:
        return {"events": self.open}

    async def open(self, call: Call) -> Response:
        pace_s = call.lenient_query(PACE_S)
        reader = call.reader_name
        if call.scope["method"] != "HEAD":
            own = sum(name == reader for name in self._open.values())
            for number, most, whose in (
                (own, MAX_STREAMS_OF_ONE_CALLER, " of this caller"),
                (len(self._open), MAX_STREAMS, ""),
            ):
                if number >= most:
                    detail = f"{most} streams{whose} are open already, which is the limit; poll /pool instead."
                    raise Refusal(503, detail, {"Retry-After": "5"})
        listener = Listener()
        messages = (
            self._events.messages(listener, call.target) if pace_s is None else self._changes.messages(listener, pace_s)
        )
        return Response(200, self._stream(listener, reader, messages, call.receive), HEADERS)

    async def _stream(
        self, listener: Listener, reader: str, messages: AsyncGenerator[bytes, None], receive: Receive
    ) -> AsyncGenerator[bytes, None]:
        if self._is_closed:
            listener.end()
        self._open[listener] = reader
        gone = asyncio.ensure_future(until_gone(receive))
        gone.add_done_callback(lambda _: listener.end())
        try:
            async with aclosing(messages) as bodies:
                async for body in bodies:
                    yield body
        finally:
            gone.cancel()
            self._open.pop(listener, None)
