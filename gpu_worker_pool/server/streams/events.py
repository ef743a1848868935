"""GET /events: all events, as they happen."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.snapshot import Snapshot
from gpu_worker_pool.server.calls.lease_view import lease_view
from gpu_worker_pool.server.calls.scoped import first_waiters, nodes_of
from gpu_worker_pool.server.http.response import encode
from gpu_worker_pool.server.http.scope import EVERYTHING, Scope
from gpu_worker_pool.wire.events import DrainedGpu, GpuInService, GpuOutOfService, IgnoredNames, Nothing, QueueChange

from .listener import HEARTBEAT_S, Listener, wake_all

# The events that are kept for listeners that read slowly.
KEPT = 1000
KEPT_BYTES = 4 * 1024 * 1024
# Sent at a time, so that a listener that reads slowly costs no more.
PIECE_BYTES = 64 * 1024
MOST_QUEUED = 100


class Audience(NamedTuple):
    """The nodes that an event concerns, None for all; and whether it is for listeners to everything too."""

    nodes: frozenset[str] | None
    is_for_all: bool = True

    def includes(self, scope: Scope) -> bool:
        if scope.node is None:
            return self.is_for_all
        return self.nodes is None or scope.node in self.nodes


FOR_ALL = Audience(None)
FOR_WHOLE = Audience(frozenset())


class EventStream:
    """Keeps the last events and sends them to all listeners. Each listener has a position in one shared list, so a slow
    one costs no memory; one that falls behind the start of the list must start over.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept: deque[tuple[Audience, bytes]] = deque()
        self._kept_bytes = 0
        self._count = 0
        self._listeners: dict[Listener, Scope] = {}
        pool.follow(self.follow)

    def __repr__(self) -> str:
        return f"<EventStream: {len(self._listeners)} listeners, {self._count} events>"

    def follow(self, events: Sequence[ev.Event]) -> None:
        if not self._listeners:
            self._kept.clear()
            self._kept_bytes = 0
            return
        was_queue_changed = False
        for event in events:
            match event:
                case ev.LeaseQueued() | ev.LeaseGranted() | ev.GrantWithdrawn() | ev.LeaseWarned() | ev.LeaseEnded():
                    self._record_lease(event)
                    was_queue_changed = was_queue_changed or not isinstance(event, ev.LeaseWarned)
                case ev.GpuDrained():
                    drained = DrainedGpu(lease_id=event.lease_id, **_gpu(event.gpu))
                    self._record("gpu_drained", drained, _at(event.gpu))
                case ev.Configured():
                    self._record_configured(event)
        if was_queue_changed:
            self._record_queue()
        wake_all(self._listeners)

    def _record_configured(self, event: ev.Configured) -> None:
        match event.table:
            case "excluded":
                gpu = GpuKey(*event.key)
                if event.value is None:
                    self._record("gpu_in_service", GpuInService(**_gpu(gpu)), _at(gpu))
                else:
                    excluded = GpuOutOfService(**_gpu(gpu), reason=str(event.value))
                    self._record("gpu_out_of_service", excluded, _at(gpu))
            case "quotas" | "bookings":
                self._record("plans", Nothing())
            case "ignored_processes":
                names = tuple(sorted(self._pool.state.ignored_processes))
                self._record("ignored_processes", IgnoredNames(names=names))

    def note_snapshot(self, snapshot: Snapshot) -> None:
        if self._listeners:
            # They are of the box of this server, and of no other.
            whole = self._pool.membership is None
            audience = Audience(frozenset({self._pool.node}), is_for_all=whole)
            self._record_encoded("readings", snapshot.ask("summary_body"), audience)
            wake_all(self._listeners)

    async def messages(self, listener: Listener, scope: Scope = EVERYTHING) -> AsyncGenerator[bytes, None]:
        """Yield what happens from now on, until the listener is gone."""
        cursor = self._count
        self._listeners[listener] = scope
        try:
            yield b"retry: 1000\n: connected\n\n"
            while not listener.is_over:
                before = cursor
                body, cursor = self._since(cursor, scope)
                if body:
                    yield body
                elif cursor != before:
                    continue  # what there was is not for this scope
                elif not await listener.wait(HEARTBEAT_S):
                    yield b": still here\n\n"
        finally:
            self._listeners.pop(listener, None)

    def _record_lease(
        self, event: ev.LeaseQueued | ev.LeaseGranted | ev.GrantWithdrawn | ev.LeaseWarned | ev.LeaseEnded
    ) -> None:
        state = self._pool.state
        lease = state.find(event.lease_id)
        if lease is not None:
            # More may have happened since; the event shows the lease as it was.
            name, as_it_was = _AS_IT_WAS[type(event)]
            nodes = nodes_of(lease)
            # A waiter that any node may serve concerns them all.
            audience = Audience(nodes) if nodes else FOR_ALL
            self._record(name, replace(lease_view(state, lease, self._pool.now()), **as_it_was), audience)

    def _record_queue(self) -> None:
        """The waiters, once for each scope that is listened to."""
        state = self._pool.state
        for node in {scope.node for scope in self._listeners.values()}:
            first, length = first_waiters(state, Scope(node), self._pool.now(), MOST_QUEUED)
            audience = FOR_WHOLE if node is None else Audience(frozenset({node}), is_for_all=False)
            self._record("queue", QueueChange(length=length, first=tuple(first)), audience)

    def _record(self, name: str, data: object, audience: Audience = FOR_ALL) -> None:
        self._record_encoded(name, encode(data), audience)

    def _record_encoded(self, name: str, data: bytes, audience: Audience) -> None:
        self._count += 1
        message = b"event: %b\ndata: %b\n\n" % (name.encode(), data)
        self._kept.append((audience, message))
        self._kept_bytes += len(message)
        while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _since(self, cursor: int, scope: Scope) -> tuple[bytes, int]:
        missing = self._count - cursor
        if missing > len(self._kept):
            return b"event: reset\ndata: {}\n\n", self._count
        messages: list[bytes] = []
        size = 0
        for audience, message in islice(self._kept, len(self._kept) - missing, None):
            cursor += 1
            if not audience.includes(scope):
                continue
            messages.append(message)
            size += len(message)
            if size >= PIECE_BYTES:
                break
        return b"".join(messages), cursor


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


def _at(key: GpuKey) -> Audience:
    return Audience(frozenset({key.node}))


def _gpu(key: GpuKey) -> dict[str, str]:
    return {"node": key.node, "uuid": key.uuid}
