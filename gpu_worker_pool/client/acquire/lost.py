"""The loss of a lease, as something to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from gpu_worker_pool.host.clock import boot_time


class Lost:
    """Set when the lease is over before it was released: `await assignment.lost`, or ask `is_set()`.

    The holder gives up before the server does: one heartbeat before the TTL would end it, counted from when the last
    heartbeat that got through was *sent*. `is_set` goes by the clock, so that it is right even when this process was
    stopped or the machine slept, before any timer has run. A local lease lasts as long as its process, whatever happens
    to the server meanwhile: it is lost only when the server says so.
    """

    def __init__(self, ttl_s: float, *, is_local: bool = False) -> None:
        self.ttl_s = ttl_s
        self.is_local = is_local
        # When the lease is lost if no further heartbeat gets through; None where only its server can say that it is.
        self.ends_at: float | None = None
        self.reason: str | None = None
        # The server's code for the reason, such as time_limit; None where the server did not say that it ended.
        self.code: str | None = None
        self._event = asyncio.Event()
        self._is_over = False

    def is_set(self) -> bool:
        if self._event.is_set():
            return True
        return not self._is_over and self.ends_at is not None and boot_time() >= self.ends_at

    async def wait(self) -> str:
        await self._event.wait()
        return self.reason or "lost"

    def __await__(self) -> Generator[Any, None, str]:
        return self.wait().__await__()

    def extend(self, ends_at: float) -> None:
        """Note that a heartbeat got through; a lost lease stays lost."""
        if not self.is_set():
            self.ends_at = max(ends_at, self.ends_at or ends_at)

    def set(self, reason: str, code: str | None = None) -> bool:
        """Declare the lease lost; returns False where it was lost or released before."""
        if self._is_over or self._event.is_set():
            return False
        self.reason, self.code = reason, code
        self._event.set()
        return True

    def settle(self) -> None:
        """Note that the lease was released, so that it can no longer be lost."""
        self._is_over = True

    def __repr__(self) -> str:
        return f"<Lost: {self.reason or ('yes' if self.is_set() else 'no')}>"
