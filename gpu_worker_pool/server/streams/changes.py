"""GET /events?pace_s=...: reports that something changed, at most so often. The client then reads the pool again.

A page that is open for days must cost the leases nothing: nothing is rendered for it, and between two events it is not
even woken.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.snapshot import Snapshot

from .listener import HEARTBEAT_S, Listener, Rest, wake_all

CHANGED = b"event: changed\ndata: {}\n\n"
STILL_HERE = b"event: still_here\ndata: {}\n\n"

# Events that change nothing visible: renewals, refusals, and the pool's bookkeeping. Readings count by their snapshot.
_NO_CHANGE = (ev.Refused, ev.LeasesRenewed, ev.QueueSettled)


class ChangeStream:
    """Counts changes, and wakes the listeners that wait for one."""

    def __init__(self, pool: Pool, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._pool = pool
        self._heartbeat_s = heartbeat_s
        self._count = 0
        self._shown: Snapshot | None = None
        self._waiting: set[Listener] = set()
        self._rest = Rest()
        pool.follow(self.follow)

    def follow(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            if isinstance(event, ev.GpusObserved) and self._pool.membership is None:
                self.note_snapshot(self._pool.snapshot)
            elif not isinstance(event, _NO_CHANGE):
                self._change()
                return  # one change for all events; the application reports new snapshots too

    def note_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot is not self._shown:
            self._shown = snapshot
            self._change()

    async def messages(self, listener: Listener, pace_s: float) -> AsyncGenerator[bytes, None]:
        """Yield the messages for a listener until it is gone."""
        seen = self._count
        yield b"retry: 1000\n: connected\n\n"
        while not listener.is_over:
            if seen != self._count:
                seen = self._count
                yield CHANGED
                await self._rest.take(listener, pace_s)  # only `end` wakes it before
            elif not await self._next(listener):
                yield STILL_HERE

    async def _next(self, listener: Listener) -> bool:
        """Wait for a change or the heartbeat; return whether there may be a change."""
        self._waiting.add(listener)
        try:
            return await listener.wait(self._heartbeat_s)
        finally:
            self._waiting.discard(listener)

    def _change(self) -> None:
        self._count += 1
        if self._waiting:
            waiting, self._waiting = self._waiting, set()
            wake_all(waiting)
