"""GET /events: all events, as they happen."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.queue.order import Order
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.snapshot import Snapshot
from gpu_worker_pool.server.calls.lease_view import lease_view
from gpu_worker_pool.server.http.response import encode
from gpu_worker_pool.wire.events import DrainedGpu, GpuInService, GpuOutOfService, IgnoredNames, Nothing, QueueChange

from .listener import HEARTBEAT_S, Listener, event_number

# So many events are kept for clients that come back after their connection broke.
KEPT = 1000
KEPT_BYTES = 4 * 1024 * 1024
# Sent at a time, so that a listener that reads slowly costs no more.
PIECE_BYTES = 64 * 1024
MOST_QUEUED = 100
# How long events are recorded for the return of the last listener.
RETURN_S = 60.0


class EventStream:
    """Keeps the last events and sends them to all listeners. Each listener has a position in one shared list, so a slow
    one costs no memory; one that falls behind the start of the list must start over.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._epoch = secrets.token_hex(4)
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._count = 0
        self._listeners: set[Listener] = set()
        self._wanted_until = float("-inf")
        pool.follow(self.follow)

    def follow(self, events: Sequence[ev.Event]) -> None:
        if not self._is_wanted():
            self._stop_recording()
            return
        was_queue_changed = False
        for event in events:
            match event:
                case ev.LeaseQueued() | ev.LeaseGranted() | ev.LeaseWarned() | ev.LeaseEnded():
                    self._record_lease(event)
                    was_queue_changed = was_queue_changed or not isinstance(event, ev.LeaseWarned)
                case ev.GpuDrained():
                    self._record("gpu_drained", DrainedGpu(lease_id=event.lease_id, **_gpu(event.gpu)))
                case ev.GpuExcluded():
                    self._record("gpu_out_of_service", GpuOutOfService(**_gpu(event.gpu), reason=event.reason))
                case ev.GpuIncluded():
                    self._record("gpu_in_service", GpuInService(**_gpu(event.gpu)))
                case ev.QuotaChanged() | ev.GpusBooked() | ev.BookingEnded():
                    self._record("plans", Nothing())
                case ev.ProcessIgnored() | ev.ProcessCounted():
                    names = tuple(sorted(self._pool.state.ignored_processes))
                    self._record("ignored_processes", IgnoredNames(names=names))
        if was_queue_changed:
            self._record_queue()
        self._wake()

    def note_snapshot(self, snapshot: Snapshot) -> None:
        if self._is_wanted():
            self._record("readings", snapshot.summary)
            self._wake()

    async def messages(self, listener: Listener, last_event_id: str | None) -> AsyncGenerator[bytes, None]:
        cursor = self._cursor(last_event_id)
        self._listeners.add(listener)
        try:
            opening = b"retry: 1000\n: connected\n\n"
            if cursor is None:
                # The earlier events are not known any more, or another server had them.
                opening += b"event: reset\ndata: {}\n\n"
                cursor = self._count
            yield opening
            while not listener.is_over:
                body, cursor = self._since(cursor)
                if body:
                    yield body
                elif not await listener.wait(HEARTBEAT_S):
                    yield b": still here\n\n"
        finally:
            self._listeners.discard(listener)
            self._wanted_until = self._pool.now() + RETURN_S

    def _is_wanted(self) -> bool:
        return bool(self._listeners) or self._pool.now() < self._wanted_until

    def _stop_recording(self) -> None:
        """Stop recording: a client that comes back later must start over."""
        if self._kept:
            self._kept.clear()
            self._kept_bytes = 0
            self._epoch = secrets.token_hex(4)

    def _record_lease(self, event: ev.LeaseQueued | ev.LeaseGranted | ev.LeaseWarned | ev.LeaseEnded) -> None:
        state = self._pool.state
        lease = state.find(event.lease_id)
        if lease is not None:
            # More may have happened since; the event shows the lease as it was.
            name, as_it_was = _AS_IT_WAS[type(event)]
            self._record(name, replace(lease_view(state, lease, self._pool.now()), **as_it_was))

    def _record_queue(self) -> None:
        state = self._pool.state
        first = tuple(islice(chain(Order(state, self._pool.now()).lease_ids(), state.inside), MOST_QUEUED))
        parents = {id_: parent for id_ in first if (parent := state.queued(id_).request.parent) is not None}
        length = len(state.queue) + len(state.inside)
        self._record("queue", QueueChange(length=length, first=first, parents=parents))

    def _record(self, name: str, data: object) -> None:
        self._count += 1
        head = f"id: {self._epoch}-{self._count}\nevent: {name}\ndata: ".encode()
        message = head + encode(data) + b"\n\n"
        self._kept.append(message)
        self._kept_bytes += len(message)
        while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.wake()

    def _since(self, cursor: int) -> tuple[bytes, int]:
        missing = self._count - cursor
        if missing > len(self._kept):
            return b"event: reset\ndata: {}\n\n", self._count
        messages: list[bytes] = []
        size = 0
        for message in islice(self._kept, len(self._kept) - missing, None):
            messages.append(message)
            size += len(message)
            if size >= PIECE_BYTES:
                break
        return b"".join(messages), cursor + len(messages)

    def _cursor(self, last_event_id: str | None) -> int | None:
        """The position of a listener: the end, or after the last event that it saw; None if that is unknown."""
        if last_event_id is None:
            return self._count
        number = event_number(last_event_id, self._epoch)
        return number if number is not None and self._count - len(self._kept) <= number <= self._count else None


_OVER: dict[str, Any] = {"ended_at": None, "end_reason": None, "ended_by": None, "end_note": None}
# The name of each event, and what of the lease was otherwise then.
_AS_IT_WAS: dict[type[ev.Event], tuple[str, dict[str, Any]]] = {
    ev.LeaseQueued: (
        "lease_queued",
        {"state": "queued", "gpus": [], "fence": None, "granted_at": None, "env": {}, **_OVER},
    ),
    ev.LeaseGranted: ("lease_granted", {"state": "active", "reason": None, "position": None, **_OVER}),
    ev.LeaseWarned: ("lease_warned", {}),
    ev.LeaseEnded: ("lease_ended", {}),
}


def _gpu(key: GpuKey) -> dict[str, str]:
    return {"node": key.node, "uuid": key.uuid}
