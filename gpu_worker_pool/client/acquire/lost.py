"""That a lease is lost, as something one can wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from gpu_worker_pool.host.clock import boot_time


class Lost:
    """Set when the lease is over before it was given back: `await assignment.lost`, or ask `is_set()`.

    The holder gives up before the server does: one heartbeat before the TTL would end it, reckoned from when the last
    sign of life that got through was *sent*. `is_set` goes by the clock, so that it is right also when this process was
    stopped or the machine slept, before any timer had its turn.
    """

    def __init__(self, clock: Callable[[], float] = boot_time) -> None:
        self._clock = clock
        self._event = asyncio.Event()
        self._ends_at: float | None = None
        self._is_over = False
        self.reason: str | None = None

    def is_set(self) -> bool:
        """Whether the GPU must not be used any more."""
        if self._event.is_set():
            return True
        return not self._is_over and self._ends_at is not None and self._clock() >= self._ends_at

    async def wait(self) -> str:
        """Wait for the loss; returns its reason."""
        await self._event.wait()
        return self.reason or "lost"

    def __await__(self) -> Generator[Any, None, str]:
        return self.wait().__await__()

    @property
    def ends_at(self) -> float | None:
        """When it is lost if nothing more is heard; None where it cannot be."""
        return self._ends_at

    def extend(self, ends_at: float) -> None:
        """A sign of life got through; what is lost stays lost."""
        if not self.is_set():
            self._ends_at = max(ends_at, self._ends_at or ends_at)

    def set(self, reason: str) -> bool:
        """It is lost; whether that is news."""
        if self._is_over or self._event.is_set():
            return False
        self.reason = reason
        self._event.set()
        return True

    def settle(self) -> None:
        """It was given back, so it can no longer be lost."""
        self._is_over = True

    def __repr__(self) -> str:
        return f"<Lost: {self.reason or ('yes' if self.is_set() else 'no')}>"
