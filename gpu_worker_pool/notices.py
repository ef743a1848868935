"""What a holder is told of its lease while it has it: that it is lost, and that the server is about to end it.

Both can be asked and awaited, and work in the process of the client only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from datetime import timedelta
from math import inf
from typing import Any, Self

from .host.clock import boot_time
from .models import LeaseEnding

BEATS_PER_TTL = 3
# Each answer tells how long it is to the end, and answers take their time.
_SAME = timedelta(seconds=1)


class Loss:
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
        """Whether the GPU must not be used any more."""
        if self._event.is_set():
            return True
        return not self._is_over and self.ends_at is not None and boot_time() >= self.ends_at

    async def wait(self) -> str:
        """Wait for the loss and return its reason."""
        await self._event.wait()
        return self.reason or "lost"

    def __await__(self) -> Generator[Any, None, str]:
        return self.wait().__await__()

    def extend(self, sent_at: float) -> None:
        """Count the TTL from when a heartbeat was sent that got through; a lost lease stays lost. Infinity: none runs."""
        if not (self.is_local or sent_at == inf or self.is_set()):
            ends_at = sent_at + self.ttl_s * (1 - 1 / BEATS_PER_TTL)
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

    def for_another_process(self) -> Loss | None:
        """What is known there: a loss of before. An event belongs to its event loop, so of a later one nothing is heard."""
        if not self.is_set():
            return None
        copied = Loss(self.ttl_s)
        copied.set(self.reason or "lost", self.code)
        return copied

    def __deepcopy__(self, _: object) -> Self:
        return self  # as `dataclasses.asdict` copies it

    def __repr__(self) -> str:
        return f"<Loss: {self.reason or ('yes' if self.is_set() else 'no')}>"


class EndNotice:
    """Set while the server is about to end the lease: `await assignment.warned`, or ask `is_set()`. It may be withdrawn."""

    def __init__(self) -> None:
        self.ending: LeaseEnding | None = None
        self._change = asyncio.Event()

    def is_set(self) -> bool:
        """Whether the lease will be ended."""
        return self.ending is not None

    async def wait(self) -> LeaseEnding:
        """Wait for a warning and return it."""
        while (ending := self.ending) is None:
            await self._change.wait()
        return ending

    def __await__(self) -> Generator[Any, None, LeaseEnding]:
        return self.wait().__await__()

    async def changed(self) -> None:
        """Wait until there is a warning, another one, or none any more."""
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

    def __deepcopy__(self, _: object) -> Self:
        return self  # as `dataclasses.asdict` copies it

    def __repr__(self) -> str:
        return f"<EndNotice: {self.ending or 'none'}>"
