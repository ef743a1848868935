"""One client that listens to a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gpu_worker_pool.server.http.loop_share import TurnQueue, in_turns

# A message this often keeps proxies from closing a quiet stream.
HEARTBEAT_S = 15.0
# Listeners that are woken in one turn of the event loop: each is sent something then.
MOST_WOKEN = 2


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

    async def until_woken(self) -> None:
        await self._woken.wait()
        self._woken.clear()

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


class Rest:
    """A pause between two messages to a listener. Fifty pages are told of a change at the same time, and so their pauses end
    at the same time: so many of them go on in one turn of the event loop.
    """

    def __init__(self) -> None:
        self._rested = TurnQueue(MOST_WOKEN)

    async def take(self, listener: Listener, pause_s: float) -> None:
        """Wait for so long, or until the listener is woken."""
        timer = asyncio.get_running_loop().call_later(pause_s, self._rested.add, listener.wake)
        try:
            await listener.until_woken()
        finally:
            timer.cancel()


def wake_all(listeners: Iterable[Listener]) -> None:
    """Wake some of them now, and the others in the next turns of the event loop."""
    in_turns(MOST_WOKEN, Listener.wake, listeners)
