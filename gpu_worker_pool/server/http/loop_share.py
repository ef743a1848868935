"""Long work in pieces, so that nobody waits for the whole of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# Nobody waits longer than this for work in the event loop that nobody hurries for; and what takes no longer, as the pool of
# an ordinary box, is of one moment.
LOOP_SLICE_S = 0.002
# The same for work in a thread.
THREAD_SLICE_S = 0.0005
# Long enough for another thread to take over the interpreter: one that merely lets go of it gets it back at once.
PAUSE_S = 0.0001

Clock = Callable[[], float]


class LoopShare:
    """For work in the event loop: others have their turn whenever a piece of it has taken long enough. Time that the
    machine gave to other programs does not count.
    """

    def __init__(self, clock: Clock = time.thread_time) -> None:
        self._clock = clock
        self._began = clock()

    async def yield_if_due(self) -> None:
        """Called often; stands aside where it is time to."""
        if self._clock() - self._began >= LOOP_SLICE_S:
            await asyncio.sleep(0)
            self._began = self._clock()


class Pauses:
    """For work in a thread, which keeps the interpreter from the event loop as long as it runs."""

    def __init__(self, clock: Clock = time.perf_counter, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._began = clock()

    def yield_if_due(self) -> None:
        """Called often; stands aside where it is time to."""
        if self._clock() - self._began >= THREAD_SLICE_S:
            self._sleep(PAUSE_S)
            self._began = self._clock()
