"""GET /events: an open connection that tells what happens, or only that something did (Server-Sent Events)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from gpu_worker_pool.server.authority.authority import Authority
from gpu_worker_pool.server.authority.snapshot import Snapshot
from gpu_worker_pool.server.http.access import merge_headers
from gpu_worker_pool.server.http.call import until_gone
from gpu_worker_pool.server.http.problems import problem

from .changes import ChangeStream
from .events import EventStream
from .listener import Listener

MAX_STREAMS = 256
FEWEST_PACE_S = 0.1
MOST_PACE_S = 60.0

Tell = Callable[[Listener, str | None], AsyncGenerator[bytes, None]]


class Streams:
    """All open streams, of both kinds together."""

    def __init__(self, authority: Authority, *, is_open_to_pages: bool) -> None:
        self._events = EventStream(authority)
        self._changes = ChangeStream(authority)
        self._open: set[Listener] = set()
        self._is_closed = False
        self._pages = {"Access-Control-Allow-Origin": "*"} if is_open_to_pages else {}
        self._headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            *((name.lower().encode(), value.encode()) for name, value in self._pages.items()),
        ]

    def show(self, snapshot: Snapshot) -> None:
        """Tell what was measured."""
        self._events.show(snapshot)
        self._changes.show(snapshot)

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        for listener in self._open:
            listener.end()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the client goes away or the server stops."""
        tell = self._kind(scope.get("query_string", b""))
        if isinstance(tell, str):
            await problem(422, tell, self._pages)(scope, receive, send)
        elif scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send({"type": "http.response.body", "body": b""})
        elif len(self._open) >= MAX_STREAMS:
            detail = f"{MAX_STREAMS} streams are open already, and no more can be; poll /pool instead."
            await problem(503, detail, {"Retry-After": "5", **self._pages})(scope, receive, send)
        else:
            last_event_id = merge_headers(scope["headers"]).get("last-event-id")
            await self._stream(tell, last_event_id, receive, send)

    async def _stream(self, tell: Tell, last_event_id: str | None, receive: Receive, send: Send) -> None:
        listener = Listener()
        if self._is_closed:
            listener.end()
        self._open.add(listener)
        gone = asyncio.ensure_future(until_gone(receive))
        gone.add_done_callback(lambda _: listener.end())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            async with aclosing(tell(listener, last_event_id)) as bodies:
                async for body in bodies:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._open.discard(listener)

    def _kind(self, query: bytes) -> Tell | str:
        """What tells such a listener; why none does where the query is no good. What else is in it does not matter."""
        for name, value in parse_qsl(query.decode("latin-1")[:1000], keep_blank_values=True):
            if name == "pace_s":
                pace_s = _number(value)
                if pace_s is None or not FEWEST_PACE_S <= pace_s <= MOST_PACE_S:
                    return f"pace_s: {value[:40]!r} is no number of seconds from {FEWEST_PACE_S:g} to {MOST_PACE_S:g}."
                return lambda listener, last_event_id: self._changes.tell(listener, last_event_id, pace_s)
        return self._events.tell


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
