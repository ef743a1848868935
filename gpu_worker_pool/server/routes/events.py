"""GET /events: an open connection that sends each event, or only that something changed (Server-Sent Events); and the last events,
for the page.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import Lease, QueuedLease
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.box.snapshot import Snapshot
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import PoolRouter
from gpu_worker_pool.server.http.response import Headers, Refusal, Response
from gpu_worker_pool.server.parameters import PaceS
from gpu_worker_pool.server.views.lease_view import gpu_ref
from gpu_worker_pool.server.views.target import EVERYTHING, Target
from gpu_worker_pool.wire.pool import RecentEvent, RecentKind

MAX_STREAMS: Final = 256
MAX_STREAMS_OF_ONE_CALLER: Final = 64
# A message this often keeps proxies from closing a quiet stream.
HEARTBEAT_S: Final = 15.0
# What may wait for a follower that reads slowly, and what it is sent at a time.
MOST_PENDING: Final = 1000
MOST_SENT: Final = 50
# The events that the page is told of.
MOST_RECENT: Final = 50

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
_KINDS: dict[type[ev.Event], RecentKind] = {
    ev.LeaseQueued: "queued",
    ev.LeaseGranted: "granted",
    ev.GrantWithdrawn: "queued",
    ev.LeaseWarned: "warned",
    ev.LeaseEnded: "ended",
    ev.GpuDrained: "drained",
}
# The names of the events on a stream.
_OF_GPUS: Final = frozenset({"drained", "out_of_service", "in_service"})

router = PoolRouter(tags=("leases",), answered_by="leader")


@router.get(
    "/events",
    ignores_query=True,
    problems=(422, 503),
    media_type="text/event-stream",
    help="Follow the events of the pool, as Server-Sent Events",
)
async def events(call: Call, pace_s: PaceS = None) -> Response:
    """The events of the pool, as Server-Sent Events.

    `lease_queued` (not of a lease that is granted at once), `lease_granted`, `lease_warned`, `lease_ended`, `gpu_drained`,
    `gpu_out_of_service` and `gpu_in_service`. Each says when (`at`), which lease, whose it is, which GPUs, and why (`reason`,
    `by`, `note`); `GET /leases/{id}` has the rest. Events have no ids: a client that reconnects reads `/pool` again. One that
    reads too slowly gets `reset`, and does the same. With `pace_s` there is only `changed`, and `still_here` every 15
    seconds of quiet.
    """
    if call.method == "HEAD":
        return Response(200, _none(), HEADERS)
    return Response(200, call.part(Streams).subscribe(call.reader_name, call.target, pace_s, call.gone), HEADERS)


async def _none() -> AsyncGenerator[bytes, None]:
    for body in list[bytes]():
        yield body


class Happening(NamedTuple):
    """An event that people are told of, with its lease at that time: None if it has none, or the lease is not known any more.
    It is kept as it is, which is cheap; its view is made when it is asked for.
    """

    kind: RecentKind
    event: ev.Event
    lease: Lease | None

    @classmethod
    def of(cls, event: ev.Event, state: PoolState) -> Happening | None:
        """None of an event that people are not told of."""
        kind = _KINDS.get(type(event))
        if isinstance(event, ev.Configured) and event.table == "excluded":
            kind = "in_service" if event.value is None else "out_of_service"
        if kind is None:
            return None
        lease_id = getattr(event, "lease_id", None)
        return cls(kind, event, None if lease_id is None else state.find(lease_id))

    def view(self, state: PoolState) -> RecentEvent:
        event, request = self.event, self._request
        return RecentEvent(
            at=iso_time(event.at + state.wall_offset_s),
            kind=self.kind,
            lease_id=getattr(event, "lease_id", None),
            owner=request.holder.owner if request else None,
            worker_id=request.holder.worker_id if request else None,
            label=dict(request.labels).get("command") if request else None,
            gpus=tuple(gpu_ref(state, key) for key in self._gpus()),
            reason=self._reason(),
            by=event.by if isinstance(event, ev.LeaseEnded) else None,
            note=event.why if isinstance(event, ev.LeaseEnded) else None,
        )

    def is_within(self, target: Target) -> bool:
        """Whether it is of a GPU within the target, or of a waiter that GPUs there may serve."""
        if target.node is None:
            return True
        if nodes := {key.node for key in self._gpus()}:
            return target.node in nodes
        return self._request is not None and self._request.wishes.node in {None, target.node}

    @property
    def _request(self) -> Request | None:
        found: Request | None = getattr(self.event, "request", None)
        return found or (self.lease.request if self.lease else None)

    def _reason(self) -> str | None:
        """Why; None of a warning that was withdrawn."""
        if isinstance(self.event, ev.Configured):
            return None if self.event.value is None else str(self.event.value)
        reason = self.event.reason if isinstance(self.event, ev.LeaseEnded | ev.LeaseWarned) else None
        return None if reason is None else str(reason)

    def _gpus(self) -> tuple[GpuKey, ...]:
        match self.event:
            case ev.LeaseGranted(gpus=gpus):
                return gpus
            case ev.LeaseEnded() | ev.LeaseWarned() if self.lease is not None:
                return () if isinstance(self.lease, QueuedLease) else self.lease.gpus
            case ev.GpuDrained(gpu=gpu):
                return (gpu,)
            case ev.Configured(key=key):
                return (GpuKey(*key),)
        return ()


class Follower:
    """An open stream, and the messages that wait to be sent on it. One with a pace is only told that something changed."""

    def __init__(self, caller: str, target: Target, pace_s: float | None) -> None:
        self.caller, self.target, self.pace_s = caller, target, pace_s
        self.pending: deque[bytes] = deque()
        self.is_over = False
        self._has_news = asyncio.Event()

    def end(self) -> None:
        self.is_over = True
        self._has_news.set()

    def send(self, message: bytes) -> None:
        if len(self.pending) >= MOST_PENDING:
            self.pending.clear()
            message = RESET
        self.pending.append(message)
        self._has_news.set()

    async def wait(self, timeout_s: float, *, also_for_messages: bool = True) -> None:
        """Wait for the end, or for a message, no longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (self.is_over or (also_for_messages and self.pending)):
                    self._has_news.clear()
                    await self._has_news.wait()


class Streams:
    """All streams, and the last events."""

    def __init__(self, pool: Pool, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._pool = pool
        self._heartbeat_s = heartbeat_s
        self._followers: dict[Follower, None] = {}  # the oldest first
        self._recent: deque[Happening] = deque(maxlen=MOST_RECENT)
        self._is_closed = False
        self._shown: Snapshot | None = None
        pool.follow(self.follow)

    def recent(self, target: Target) -> tuple[RecentEvent, ...]:
        """The last events within a target, latest first."""
        return tuple(each.view(self._pool.state) for each in reversed(self._recent) if each.is_within(target))

    def close(self) -> None:
        self._is_closed = True
        for follower in self._followers:
            follower.end()

    def subscribe(
        self,
        caller: str,
        target: Target = EVERYTHING,
        pace_s: float | None = None,
        watch: Callable[[], asyncio.Future[None]] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield what happens within a target from now on, until the client is gone, which `watch` says, the server stops or the
        iterator is closed. With a pace, only that something changed. Refusal if the caller has too many.
        """
        self._make_room(caller)
        return self._messages(Follower(caller, target, pace_s), watch() if watch else None)

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
                await follower.wait(self._heartbeat_s)
                if number := min(len(follower.pending), MOST_SENT):
                    yield b"".join(follower.pending.popleft() for _ in range(number))
                    if follower.pace_s is not None:
                        await follower.wait(follower.pace_s, also_for_messages=False)
                elif not follower.is_over:
                    yield b": still here\n\n" if follower.pace_s is None else STILL_HERE
        finally:
            del self._followers[follower]
            if gone is not None:
                gone.cancel()

    def note_snapshot(self, snapshot: Snapshot) -> None:
        """Note that these readings were taken on this box."""
        if snapshot is not self._shown:
            self._shown = snapshot
            self._note_change()

    def follow(self, events: Sequence[ev.Event]) -> None:
        state = self._pool.state
        happened = [each for event in events if (each := Happening.of(event, state)) is not None]
        self._recent += happened
        if not self._followers:
            return
        if any(isinstance(event, ev.GpusObserved) for event in events) and self._pool.membership is None:
            self.note_snapshot(self._pool.snapshot)
        if any(not isinstance(event, _NO_CHANGE) for event in events):
            self._note_change()
        readers = [follower for follower in self._followers if follower.pace_s is None]
        for each in happened if readers else ():
            name = f"{'gpu' if each.kind in _OF_GPUS else 'lease'}_{each.kind}".encode()
            message = b"event: %b\ndata: %b\n\n" % (name, encode(each.view(state)))
            for reader in readers:
                if each.is_within(reader.target):
                    reader.send(message)

    def _note_change(self) -> None:
        for follower in self._followers:
            if follower.pace_s is not None and not follower.pending:
                follower.send(CHANGED)


def _full(which: str) -> Refusal:
    return Refusal(503, f"{which} are open already, which is the limit; poll /pool instead.", {"Retry-After": "5"})
