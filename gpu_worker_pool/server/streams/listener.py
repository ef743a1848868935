"""One client that listens to a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gpu_worker_pool.server.http.loop_share import in_turns

# A message this often keeps proxies from closing a quiet stream.
HEARTBEAT_S = 15.0
# Listeners that are woken in one turn of the event loop: each is sent something then.
MOST_WOKEN = 8


class Listener:
    """Waits to be woken; `is_over` once the client has gone or the server stops."""

    def __init__(self) -> None:
        self.is_over = False
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    def end(self) -> None:
        self.is_over = True
        self._woken.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait to be woken; return whether it was within this time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return False
        finally:
            self._woken.clear()
        return True


def wake_all(listeners: Iterable[Listener]) -> None:
    """Wake some of them now, and the others in the next turns of the event loop."""
    in_turns(MOST_WOKEN, Listener.wake, listeners)


def event_number(event_id: str, epoch: str) -> int | None:
    """The number in an event's id, `epoch-number`; None if the id is not of this epoch."""
    theirs, _, number = event_id.partition("-")
    is_known = theirs == epoch and number.isascii() and number.isdigit() and len(number) < 18
    return int(number) if is_known else None
