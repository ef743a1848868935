"""GET /events?pace_s=...: that something happened, at most so often. Whoever hears it looks anew.

A page that is open for days must cost the leases nothing: nothing is rendered for it, and while it rests between two
events it is not even woken.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.snapshot import Snapshot

from .listener import HEARTBEAT_S, Listener

STILL_HERE = b"event: still_here\ndata: {}\n\n"

# What changes nothing that is shown: signs of life, what was refused, and the pool's own reckoning. What was measured
# counts by the snapshot.
_NO_CHANGE = (ev.Refusal, ev.LeasesRenewed, ev.QueueSettled)


class ChangeStream:
    """Counts changes, and wakes those who wait for one."""

    def __init__(self, pool: Pool, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._pool = pool
        self._heartbeat_s = heartbeat_s
        self._epoch = secrets.token_hex(4)
        self._count = 0
        self._shown: Snapshot | None = None
        self._waiting: set[Listener] = set()
        pool.follow(self.follow)

    def follow(self, events: Sequence[ev.Event]) -> None:
        """Something happened in the pool."""
        for event in events:
            if isinstance(event, ev.GpusObserved):
                self.show(self._pool.snapshot)
            elif not isinstance(event, _NO_CHANGE):
                self._change()
                return  # one for all of them; a snapshot among the rest is shown by whoever watches for new ones

    def show(self, snapshot: Snapshot) -> None:
        """Something was measured."""
        if snapshot is not self._shown:
            self._shown = snapshot
            self._change()

    async def tell(self, listener: Listener, last_event_id: str | None, pace_s: float) -> AsyncGenerator[bytes, None]:
        """What to send to a listener, until he is gone. Whoever was here before hears at once whether he missed anything;
        the number is told at the beginning too, so that this holds for one who never heard of a change.
        """
        seen = self._count if last_event_id is None else self._seen(last_event_id)
        yield b"retry: 1000\n%b: connected\n\n" % (self._id() if seen == self._count else b"")
        while not listener.is_over:
            if seen != self._count:
                seen = self._count
                yield b"%bevent: changed\ndata: {}\n\n" % self._id()
                await listener.wait(pace_s)  # nobody wakes him but when he is gone
            elif not await self._next(listener):
                yield STILL_HERE

    async def _next(self, listener: Listener) -> bool:
        """Wait for a change; whether there may be one."""
        self._waiting.add(listener)
        try:
            return await listener.wait(self._heartbeat_s)
        finally:
            self._waiting.discard(listener)

    def _change(self) -> None:
        self._count += 1
        if self._waiting:
            for listener in self._waiting:
                listener.wake()
            self._waiting.clear()

    def _id(self) -> bytes:
        return b"id: %b-%d\n" % (self._epoch.encode(), self._count)

    def _seen(self, last_event_id: str) -> int | None:
        """How many changes he knows of; None where that cannot be told, so that he has to look anew."""
        epoch, _, number = last_event_id.partition("-")
        if epoch != self._epoch or not (number.isascii() and number.isdigit() and len(number) < 18):
            return None
        return int(number)
