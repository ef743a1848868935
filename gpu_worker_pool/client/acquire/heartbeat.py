"""Keeps the leases at one endpoint alive, and says early when one is lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from math import inf

from gpu_worker_pool.client.backends.lease_book import LeaseBook
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time

from .lost import Lost

BEATS_PER_TTL = 3
# How soon to try again after a heartbeat that did not get through.
TRY_AGAIN_S = 0.5
MOST_IDS = 500


class Heartbeat:
    """One task for all leases at an endpoint: one call renews them all. The task runs while there are leases."""

    def __init__(self, book: LeaseBook, on_lost: Callable[[str, str], None]) -> None:
        self._book = book
        self._on_lost = on_lost
        self._held: dict[str, Lost] = {}
        self._task: asyncio.Task[None] | None = None
        self._pid = os.getpid()

    def add(self, lease_id: str, lost: Lost, safe_since: float) -> None:
        _extend(lost, safe_since)
        self._held[lease_id] = lost
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="gpu-lease-heartbeat")

    def drop(self, lease_id: str) -> None:
        self._held.pop(lease_id, None)
        if not self._held and self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Stop; leases that are still held expire."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        nap_s = beat_s = self._beat_s()
        while self._held and os.getpid() == self._pid:
            await asyncio.sleep(self._until_next(nap_s))
            self._give_up_what_is_late()
            if not self._held:
                return
            try:
                # No longer than until a lease is to be given up.
                async with asyncio.timeout(self._until_next(beat_s)):
                    await self._beat()
                nap_s = self._beat_s() if self._held else beat_s
            except (EndpointError, TimeoutError):
                nap_s = min(TRY_AGAIN_S, beat_s / 2)
            self._give_up_what_is_late()

    def _beat_s(self) -> float:
        return min(lost.ttl_s for lost in self._held.values()) / BEATS_PER_TTL

    def _until_next(self, nap_s: float) -> float:
        """How long until the next heartbeat, or until a lease is to be given up."""
        soonest = min((lost.ends_at for lost in self._held.values() if lost.ends_at is not None), default=inf)
        return max(min(nap_s, soonest - boot_time()), 0.0)

    async def _beat(self) -> None:
        ids = list(self._held)
        for start in range(0, len(ids), MOST_IDS):
            renewal = await self._book.renew(ids[start : start + MOST_IDS])
            for lease_id in renewal.renewed:
                if lease_id in self._held:
                    _extend(self._held[lease_id], renewal.sent_at)
            for lease_id, reason in renewal.lost.items():
                self._give_up(lease_id, f"the server says: {reason}")

    def _give_up_what_is_late(self) -> None:
        for lease_id, lost in list(self._held.items()):
            if lost.is_set():
                self._give_up(lease_id, "no heartbeat got through in time")

    def _give_up(self, lease_id: str, reason: str) -> None:
        lost = self._held.pop(lease_id, None)
        if lost is not None and lost.set(reason):
            self._on_lost(lease_id, reason)


def _extend(lost: Lost, sent_at: float) -> None:
    """Count the TTL from when a heartbeat was sent; the lease is given up one heartbeat before its end."""
    lost.extend(sent_at + lost.ttl_s * (1 - 1 / BEATS_PER_TTL))
