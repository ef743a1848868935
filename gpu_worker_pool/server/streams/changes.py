"""GET /events?pace_s=...: reports that something changed, at most so often. The client then reads the pool again.

A page that is open for days must cost the leases nothing: nothing is rendered for it, and between two events it is not
even woken.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.snapshot import Snapshot

from .listener import HEARTBEAT_S, Listener, Rest, event_number, wake_all

STILL_HERE = b"event: still_here\ndata: {}\n\n"

# Events that change nothing visible: renewals, refusals, and the pool's bookkeeping. Readings count by their snapshot.
_NO_CHANGE = (ev.Refusal, ev.LeasesRenewed, ev.QueueSettled, ev.SubLeasesSettled)


class ChangeStream:
    """Counts changes, and wakes the listeners that wait for one."""

    def __init__(self, pool: Pool, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._pool = pool
        self._heartbeat_s = heartbeat_s
        self._epoch = secrets.token_hex(4)
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

    async def messages(
        self, listener: Listener, last_event_id: str | None, pace_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield the messages for a listener until it is gone. A client that comes back learns at once whether it missed
        a change. The first message has the count too, so that this also works for a client that saw no change.
        """
        # None if it is unknown how many changes the client knows of; then it must read the pool again.
        seen = self._count if last_event_id is None else event_number(last_event_id, self._epoch)
        yield b"retry: 1000\n%b: connected\n\n" % (self._id() if seen == self._count else b"")
        while not listener.is_over:
            if seen != self._count:
                seen = self._count
                yield b"%bevent: changed\ndata: {}\n\n" % self._id()
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

    def _id(self) -> bytes:
        return b"id: %b-%d\n" % (self._epoch.encode(), self._count)
