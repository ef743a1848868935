"""Splits long work into pieces, so that nothing waits for the whole of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# The longest that a piece of such work holds the event loop. Work that is shorter, as the pool of an ordinary box, is
# not split and shows one moment.
LOOP_SLICE_S = 0.002
# The same for work in a thread.
THREAD_SLICE_S = 0.0005
# Long enough for another thread to get the interpreter: a thread that only releases it gets it back at once.
PAUSE_S = 0.0001

Clock = Callable[[], float]


class LoopShare:
    """For work in the event loop. Only CPU time counts: time that the machine gave to other programs does not."""

    def __init__(self, clock: Clock = time.thread_time) -> None:
        self._clock = clock
        self._began = clock()

    async def yield_if_due(self) -> None:
        if self._clock() - self._began >= LOOP_SLICE_S:
            await asyncio.sleep(0)
            self._began = self._clock()


class Pauses:
    """For work in a thread, which keeps the event loop from the interpreter while it runs."""

    def __init__(self, clock: Clock = time.perf_counter, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._began = clock()

    def yield_if_due(self) -> None:
        if self._clock() - self._began >= THREAD_SLICE_S:
            self._sleep(PAUSE_S)
            self._began = self._clock()
