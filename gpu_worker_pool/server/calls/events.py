"""GET /events: an open connection that reports events, or only that there were some."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from gpu_worker_pool.server.http.call import Call, Handlers, until_gone
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import Headers, Response
from gpu_worker_pool.server.streams import Streams, StreamsFull
from gpu_worker_pool.wire.routes import EVENTS, PACE_S

HEADERS: Headers = (
    (b"content-type", EVENTS.encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class EventCalls:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def handlers(self) -> Handlers:
        return {"events": self.open}

    async def open(self, call: Call) -> Response:
        pace_s = call.lenient_query(PACE_S)
        if call.scope["method"] == "HEAD":
            return Response(200, _none(), HEADERS)
        gone = asyncio.ensure_future(until_gone(call.receive))
        try:
            messages = self._streams.subscribe(call.reader_name, call.view_scope.node, pace_s, gone=gone)
        except StreamsFull as full:
            gone.cancel()
            raise Refusal(503, str(full), {"Retry-After": "5"}) from None
        return Response(200, messages, HEADERS)


async def _none() -> AsyncGenerator[bytes, None]:
    for body in list[bytes]():
        yield body
