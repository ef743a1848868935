"""GET /events: what happens, as it happens (Server-Sent Events)."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from starlette.types import Receive, Scope, Send

from gpu_worker_pool.core import events as ev
from gpu_worker_pool.core.gpu import GpuKey

from .access import merge_headers
from .authority import Authority
from .calls import until_gone
from .lease_view import lease_view
from .problems import problem
from .snapshot import Snapshot, encode

# So many events are kept for whoever comes back after his connection broke.
KEPT = 1000
MAX_STREAMS = 256
# A comment this often keeps proxies from taking a quiet stream for a dead one.
HEARTBEAT_S = 15.0
# How long after the last listener left events are still put down for his return.
RETURN_S = 60.0


class EventStream:
    """Keeps the last events and sends them to whoever listens. Each listener has a place in the one list that all
    share, so a slow one costs no memory; one who falls behind its beginning is told to start over.
    """

    def __init__(self, authority: Authority, *, is_open_to_pages: bool) -> None:
        self._authority = authority
        self._epoch = secrets.token_hex(4)
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        self._count = 0
        self._listeners: set[asyncio.Event] = set()
        self._wanted_until = float("-inf")
        self._is_closed = False
        self._headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            *([(b"access-control-allow-origin", b"*")] if is_open_to_pages else []),
        ]
        authority.driver.listeners.append(self.follow)

    def follow(self, events: Sequence[ev.Event]) -> None:
        """Put down what happened in the pool."""
        if not self._is_wanted():
            self._forget()
            return
        was_queue_changed = False
        for event in events:
            match event:
                case ev.LeaseQueued() | ev.LeaseGranted() | ev.LeaseEnded():
                    self._put_lease(event)
                    was_queue_changed = True
                case ev.GpuDrained():
                    self._put("gpu_drained", {"lease_id": event.lease_id, **_gpu(event.gpu)})
                case ev.GpuExcluded():
                    self._put("gpu_out_of_service", {**_gpu(event.gpu), "reason": event.reason})
                case ev.GpuIncluded():
                    self._put("gpu_in_service", _gpu(event.gpu))
                case ev.ProcessIgnored() | ev.ProcessCounted():
                    ignored = sorted(self._authority.driver.state.ignored_processes)
                    self._put("ignored_processes", {"names": ignored})
                case _:
                    pass
        if was_queue_changed:
            ids = islice(self._authority.driver.state.queue, 100)
            self._put("queue", {"length": len(self._authority.driver.state.queue), "first": list(ids)})
        self._wake()

    def show(self, snapshot: Snapshot) -> None:
        """Put down what was measured."""
        if self._is_wanted():
            self._put("readings", snapshot.summary)
            self._wake()

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        self._wake()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client goes away or the server stops."""
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send({"type": "http.response.body", "body": b""})
            return
        if len(self._listeners) >= MAX_STREAMS:
            detail = f"{MAX_STREAMS} streams are open already, and no more can be; poll /pool instead."
            await problem(503, detail, {"Retry-After": "5"})(scope, receive, send)
            return
        cursor = self._cursor(merge_headers(scope["headers"]).get("last-event-id"))
        news = asyncio.Event()
        self._listeners.add(news)
        gone = asyncio.ensure_future(until_gone(receive))
        gone.add_done_callback(lambda _: news.set())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            opening = b"retry: 1000\n: connected\n\n"
            if cursor is None:
                # What happened before is not known here any more, or the server is another one.
                opening += b"event: reset\ndata: {}\n\n"
                cursor = self._count
            await send({"type": "http.response.body", "body": opening, "more_body": True})
            while not gone.done() and not self._is_closed:
                body, cursor = self._since(cursor)
                if not body:
                    body = await self._next(news)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._listeners.discard(news)
            self._wanted_until = self._authority.driver.now() + RETURN_S

    async def _next(self, news: asyncio.Event) -> bytes:
        """Wait for something to send; a heartbeat where nothing comes."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await news.wait()
        except TimeoutError:
            return b": still here\n\n"
        news.clear()
        return b""

    def _is_wanted(self) -> bool:
        return bool(self._listeners) or self._authority.driver.now() < self._wanted_until

    def _forget(self) -> None:
        """What happens from here on is not put down, so whoever comes back after it must start over."""
        if self._kept:
            self._kept.clear()
            self._epoch = secrets.token_hex(4)

    def _put_lease(self, event: ev.LeaseQueued | ev.LeaseGranted | ev.LeaseEnded) -> None:
        driver = self._authority.driver
        lease = driver.state.find(event.lease_id)
        if lease is not None:
            # By now more may have happened to it; what is told is how it was.
            view = lease_view(driver.state, lease, driver.now()) | _AS_IT_WAS[type(event)]
            self._put(_LEASE_EVENTS[type(event)], view)

    def _put(self, name: str, data: dict[str, Any]) -> None:
        self._count += 1
        head = f"id: {self._epoch}-{self._count}\nevent: {name}\ndata: ".encode()
        self._kept.append(head + encode(data) + b"\n\n")

    def _wake(self) -> None:
        for news in self._listeners:
            news.set()

    def _since(self, cursor: int) -> tuple[bytes, int]:
        missing = self._count - cursor
        if missing > len(self._kept):
            return b"event: reset\ndata: {}\n\n", self._count
        return b"".join(islice(self._kept, len(self._kept) - missing, None)), self._count

    def _cursor(self, last_event_id: str | None) -> int | None:
        """Where a listener goes on: at the end, or after what he saw last; None where that is not known."""
        if last_event_id is None:
            return self._count
        epoch, _, number = last_event_id.partition("-")
        if epoch != self._epoch or not (number.isascii() and number.isdigit() and len(number) < 18):
            return None
        return int(number) if self._count - len(self._kept) <= int(number) <= self._count else None


_LEASE_EVENTS: dict[type[ev.Event], str] = {
    ev.LeaseQueued: "lease_queued",
    ev.LeaseGranted: "lease_granted",
    ev.LeaseEnded: "lease_ended",
}


_OVER: dict[str, Any] = {"ended_at": None, "end_reason": None}
_AS_IT_WAS: dict[type[ev.Event], dict[str, Any]] = {
    ev.LeaseQueued: {"state": "queued", "gpus": [], "fence": None, "granted_at": None, "env": {}, **_OVER},
    ev.LeaseGranted: {"state": "active", "reason": None, "position": None, **_OVER},
    ev.LeaseEnded: {},
}


def _gpu(key: GpuKey) -> dict[str, str]:
    return {"node": key.node, "uuid": key.uuid}
