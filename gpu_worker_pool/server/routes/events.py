"""GET /events: an open connection that sends each event with its data, or only that something changed (Server-Sent Events)."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.box.snapshot import Snapshot
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import PoolRouter
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import Headers, Response
from gpu_worker_pool.server.parameters import PaceS
from gpu_worker_pool.server.views.lease_view import lease_view
from gpu_worker_pool.server.views.target import Target, nodes_of

MAX_STREAMS: Final = 256
MAX_STREAMS_OF_ONE_CALLER: Final = 64
# A message this often keeps proxies from closing a quiet stream.
HEARTBEAT_S: Final = 15.0
# What may wait for a follower that reads slowly. All followers wait for the same messages, which are kept once.
MOST_PENDING: Final = 1000
MOST_PENDING_BYTES: Final = 4 * 1024 * 1024
# Sent at a time, so that a follower that reads slowly costs no more.
PIECE_BYTES: Final = 64 * 1024
MOST_QUEUED: Final = 100

CONNECTED: Final = b"retry: 1000\n: connected\n\n"
CHANGED: Final = b"event: changed\ndata: {}\n\n"
STILL_HERE: Final = b"event: still_here\ndata: {}\n\n"
RESET: Final = b"event: reset\ndata: {}\n\n"
HEADERS: Final[Headers] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
# Events that change nothing visible: renewals, refusals, and the pool's bookkeeping. Readings count by their snapshot.
_NO_CHANGE = (ev.Refused, ev.LeasesRenewed, ev.QueueSettled, ev.GpusObserved)

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
    return Response(200, call.part(Streams).subscribe(call.reader_name, call.target.node, pace_s, call.gone), HEADERS)


async def _none() -> AsyncGenerator[bytes, None]:
    for body in list[bytes]():
        yield body


class Follower:
    """An open stream, and the messages that wait to be sent on it. One with a pace is only told that something changed."""

    def __init__(self, caller: str, node: str | None, pace_s: float | None) -> None:
        self.caller = caller
        self.node = node
        self.pace_s = pace_s
        self._pending: deque[bytes] = deque()
        self._bytes = 0
        self._has_pending = asyncio.Event()
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self) -> None:
        self._over.set()
        self._has_pending.set()

    def send(self, message: bytes) -> None:
        if len(self._pending) >= MOST_PENDING or self._bytes + len(message) > MOST_PENDING_BYTES:
            self._pending.clear()
            self._bytes = 0
            message = RESET
        self._pending.append(message)
        self._bytes += len(message)
        self._has_pending.set()

    def send_changed(self) -> None:
        if not self._pending:
            self.send(CHANGED)

    def take(self) -> bytes:
        """The next messages, in order; nothing if none waits."""
        taken = []
        size = 0
        while self._pending and size < PIECE_BYTES:
            taken.append(self._pending.popleft())
            size += len(taken[-1])
        self._bytes -= size
        return b"".join(taken)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a message or the end; return whether one of them came within this time."""
        if not self._pending and not self.is_over:
            self._has_pending.clear()
        return await _is_set_within(self._has_pending, timeout_s)

    async def pause(self) -> None:
        """Wait until the next message may be sent, or the end."""
        if self.pace_s is not None:
            await _is_set_within(self._over, self.pace_s)


class Streams:
    def __init__(self, pool: Pool, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._pool = pool
        self._heartbeat_s = heartbeat_s
        self._followers: dict[Follower, None] = {}  # the oldest first
        self._is_closed = False
        self._shown: Snapshot | None = None
        pool.follow(self.follow)

    def close(self) -> None:
        self._is_closed = True
        for follower in self._followers:
            follower.end()

    def subscribe(
        self,
        caller: str,
        node: str | None = None,
        pace_s: float | None = None,
        watch: Callable[[], asyncio.Future[None]] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield what happens from now on, on one node or everywhere, until the client is gone, which `watch` says, the server
        stops or the iterator is closed. With a pace, only that something changed. Refusal if the caller has too many.
        """
        self._make_room(caller)
        return self._messages(Follower(caller, node, pace_s), watch() if watch else None)

    def _make_room(self, caller: str) -> None:
        """If there are too many streams, end the oldest of the caller with the most, unless the new one's has as many."""
        numbers = Counter(follower.caller for follower in self._followers if not follower.is_over)
        own, total = numbers[caller], numbers.total()
        if own >= MAX_STREAMS_OF_ONE_CALLER:
            raise _full(f"{own} streams of this caller")
        if total < MAX_STREAMS:
            return
        [(greediest, most)] = numbers.most_common(1)
        if most <= own + 1:
            raise _full(f"{total} streams")
        next(each for each in self._followers if each.caller == greediest and not each.is_over).end()

    async def _messages(self, follower: Follower, gone: asyncio.Future[None] | None) -> AsyncGenerator[bytes, None]:
        if self._is_closed:
            follower.end()
        if gone is not None:
            gone.add_done_callback(lambda _: follower.end())
        self._followers[follower] = None
        try:
            yield CONNECTED
            while not follower.is_over:
                if body := follower.take():
                    yield body
                    await follower.pause()
                elif not await follower.wait(self._heartbeat_s):
                    yield b": still here\n\n" if follower.pace_s is None else STILL_HERE
        finally:
            del self._followers[follower]
            if gone is not None:
                gone.cancel()

    def note_snapshot(self, snapshot: Snapshot) -> None:
        self._note_change_to(snapshot)
        # The readings are of the box of this server, and of no other.
        own = frozenset({self._pool.node})
        if readers := self._readers(own, with_whole=self._pool.membership is None):
            _send(readers, "readings", snapshot.summary_body)

    def follow(self, events: Sequence[ev.Event]) -> None:
        if not self._followers:
            return
        if any(isinstance(event, ev.GpusObserved) for event in events) and self._pool.membership is None:
            self._note_change_to(self._pool.snapshot)
        if any(not isinstance(event, _NO_CHANGE) for event in events):
            self._note_change()
        if self._readers():
            for event in events:
                self._send_event(event)
            if any(
                isinstance(event, ev.LeaseQueued | ev.LeaseGranted | ev.GrantWithdrawn | ev.LeaseEnded)
                for event in events
            ):
                self._send_queue()

    def _note_change_to(self, snapshot: Snapshot) -> None:
        if snapshot is not self._shown:
            self._shown = snapshot
            self._note_change()

    def _note_change(self) -> None:
        for follower in self._followers:
            if follower.pace_s is not None:
                follower.send_changed()

    def _readers(self, nodes: frozenset[str] | None = None, *, with_whole: bool = True) -> list[Follower]:
        """Those that are sent an event which concerns these nodes, None for all."""
        return [
            each
            for each in self._followers
            if each.pace_s is None and (with_whole if each.node is None else nodes is None or each.node in nodes)
        ]

    def _send_event(self, event: ev.Event) -> None:
        match event:
            case ev.LeaseQueued() | ev.LeaseGranted() | ev.GrantWithdrawn() | ev.LeaseWarned() | ev.LeaseEnded():
                self._send_lease(event)
            case ev.GpuDrained(gpu=gpu, lease_id=lease_id):
                self._send("gpu_drained", {"lease_id": lease_id, "node": gpu.node, "uuid": gpu.uuid}, gpu.node)
            case ev.Configured(table="excluded", key=(node, uuid), value=None):
                self._send("gpu_in_service", {"node": node, "uuid": uuid}, node)
            case ev.Configured(table="excluded", key=(node, uuid), value=reason):
                self._send("gpu_out_of_service", {"node": node, "uuid": uuid, "reason": str(reason)}, node)
            case ev.Configured(table="quotas" | "bookings"):
                self._send("plans", {})
            case ev.Configured(table="ignored_processes"):
                self._send("ignored_processes", {"names": sorted(self._pool.state.ignored_processes)})

    def _send(self, name: str, data: object, *nodes: str) -> None:
        if readers := self._readers(frozenset(nodes) or None):
            _send(readers, name, encode(data))

    def _send_lease(
        self, event: ev.LeaseQueued | ev.LeaseGranted | ev.GrantWithdrawn | ev.LeaseWarned | ev.LeaseEnded
    ) -> None:
        state = self._pool.state
        lease = state.find(event.lease_id)
        if lease is not None:
            # More may have happened since; the event shows the lease as it was. A waiter that any node may serve concerns all.
            name, as_it_was = _AS_IT_WAS[type(event)]
            self._send(name, replace(lease_view(state, lease, self._pool.now()), **as_it_was), *nodes_of(lease))

    def _send_queue(self) -> None:
        """Send the waiters of each target that is followed."""
        for node in {reader.node for reader in self._readers()}:
            first, length = Target(node).first_waiters(self._pool.state, self._pool.now(), MOST_QUEUED)
            readers = [reader for reader in self._readers() if reader.node == node]
            _send(readers, "queue", encode({"length": length, "first": first}))


def _full(which: str) -> Refusal:
    return Refusal(503, f"{which} are open already, which is the limit; poll /pool instead.", {"Retry-After": "5"})


def _send(readers: Iterable[Follower], name: str, data: bytes) -> None:
    message = b"event: %b\ndata: %b\n\n" % (name.encode(), data)
    for reader in readers:
        reader.send(message)


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


_OVER: dict[str, Any] = {"ended_at": None, "end_reason": None, "ended_by": None, "end_note": None}
# The name of each event, and what of the lease was otherwise then.
_AS_IT_WAS: dict[type[ev.Event], tuple[str, dict[str, Any]]] = {
    ev.LeaseQueued: (
        "lease_queued",
        {"state": "queued", "gpus": [], "fence": None, "granted_at": None, "env": {}, **_OVER},
    ),
    ev.GrantWithdrawn: ("lease_queued", {}),
    ev.LeaseGranted: ("lease_granted", {"state": "active", "reason": None, "position": None, **_OVER}),
    ev.LeaseWarned: ("lease_warned", {}),
    ev.LeaseEnded: ("lease_ended", {}),
}
