"""The warning that a lease will be ended, as something to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from datetime import timedelta
from typing import Any

from gpu_worker_pool.models import LeaseEnding

# Each answer tells how long it is to the end, and answers take their time.
_SAME = timedelta(seconds=1)


class Warned:
    """Set while the server is about to end the lease: `await assignment.warned`, or ask `is_set()`."""

    def __init__(self) -> None:
        self.ending: LeaseEnding | None = None
        self._change = asyncio.Event()

    def is_set(self) -> bool:
        return self.ending is not None

    async def wait(self) -> LeaseEnding:
        while (ending := self.ending) is None:
            await self._change.wait()
        return ending

    def __await__(self) -> Generator[Any, None, LeaseEnding]:
        return self.wait().__await__()

    async def changed(self) -> None:
        await self._change.wait()

    def set(self, ending: LeaseEnding | None) -> bool:
        """Take in what the server says now; returns whether that is news."""
        known = self.ending
        if ending is None or known is None:
            is_same = ending is known
        else:
            is_same = ending.reason == known.reason and abs(ending.ends_at - known.ends_at) < _SAME
        if is_same:
            return False
        self.ending = ending
        change, self._change = self._change, asyncio.Event()
        change.set()
        return True

    def __repr__(self) -> str:
        return f"<Warned: {self.ending or 'no'}>"
