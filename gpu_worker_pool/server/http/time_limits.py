"""The time limits of the calls that are under way. They end early when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TimeLimits:
    """uvicorn waits for its connections before it tells the application to stop. A caller that sends or reads slowly must
    not keep the server from stopping for as long as it could take otherwise.
    """

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._is_stopping = False

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """As asyncio.timeout; TimeoutError at once when the server stops."""
        if asyncio.current_task() is None:
            await asyncio.sleep(0)  # a call that began without a task gets one when it waits, see exchange.py
        async with asyncio.timeout(0 if self._is_stopping else seconds) as limit:
            self._open.add(limit)
            try:
                yield
            finally:
                self._open.discard(limit)

    def stop(self) -> None:
        self._is_stopping = True
        now = asyncio.get_running_loop().time()
        for limit in self._open:
            if not limit.expired():
                limit.reschedule(now)
