"""Somebody who listens to a stream of events."""

from __future__ import annotations

import asyncio

# A sign this often keeps proxies from taking a quiet stream for a dead one.
HEARTBEAT_S = 15.0


class Listener:
    """Waits to be told; `is_over` when he has gone away or the server stops."""

    def __init__(self) -> None:
        self.is_over = False
        self._news = asyncio.Event()

    def wake(self) -> None:
        """There is something for him."""
        self._news.set()

    def end(self) -> None:
        """There is nothing for him any more."""
        self.is_over = True
        self._news.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait to be woken; whether he was within this time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        finally:
            self._news.clear()
        return True
