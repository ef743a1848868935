"""GET /events: an open connection that reports events, or only that there were some."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import PoolRouter
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import Headers, Response
from gpu_worker_pool.server.parameters import PaceS
from gpu_worker_pool.server.streams import Streams, StreamsFull

HEADERS: Final[Headers] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)

router = PoolRouter(tags=("leases",), answered_by="leader")


@router.get(
    "/events",
    ignores_query=True,
    problems=(422, 503),
    media_type="text/event-stream",
    help="Follow the events of the pool, as Server-Sent Events",
)
async def events(call: Call, pace_s: PaceS = None) -> Response:
    """The events of the pool, as Server-Sent Events."""
    if call.method == "HEAD":
        return Response(200, _none(), HEADERS)
    gone = call.gone()
    try:
        messages = call.part(Streams).subscribe(call.reader_name, call.target.node, pace_s, gone=gone)
    except StreamsFull as full:
        gone.cancel()
        raise Refusal(503, str(full), {"Retry-After": "5"}) from None
    return Response(200, messages, HEADERS)


async def _none() -> AsyncGenerator[bytes, None]:
    for body in list[bytes]():
        yield body
