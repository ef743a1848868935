"""Splits long work into pieces, so that nothing waits for the whole of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# The longest that a piece of such work holds the event loop. Work that is shorter, as the pool of an ordinary box, is not split
# and shows one moment.
SLICE_S = 0.001
# Others have this many turns of the loop between two pieces. A lease call takes about ten turns: it must not wait for a piece
# in each.
OTHERS_TURNS = 4


class LoopShare:
    """For work in the event loop. Only CPU time counts: time that the machine gave to other programs does not."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._began = clock()

    async def yield_if_due(self) -> None:
        if self._clock() - self._began >= SLICE_S:
            for _ in range(OTHERS_TURNS):
                await asyncio.sleep(0)
            self._began = self._clock()
