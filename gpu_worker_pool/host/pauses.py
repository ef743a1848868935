"""Pauses: before another try, and in long work of a thread or in the event loop, so that nothing waits for the whole of it.

The loop gives the interpreter up at every call of the system, and gets it back only when a busy thread does too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

# The longest that such a thread works without a pause.
THREAD_SLICE_S = 0.0005
# Long enough for another thread to get the interpreter: a thread that only releases it gets it back at once.
PAUSE_S = 0.0001


class Pauses:
    """For work in a thread."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._began = clock()

    def yield_if_due(self) -> None:
        if self._clock() - self._began >= THREAD_SLICE_S:
            self._sleep(PAUSE_S)
            self._began = self._clock()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays that grow by `factor` from `first_s` to `max_s`, each half fixed and half random.

    The fixed half keeps a delay above 0. The random half keeps clients that failed together from returning together.
    """

    first_s: float
    factor: float = 2.0
    max_s: float

    def delay_s(self, attempt: int, jitter: float) -> float:
        """The seconds to wait after failure number `attempt`, counted from 0. `jitter` is a random number in [0, 1)."""
        try:
            full_s = min(self.first_s * self.factor**attempt, self.max_s)
        except OverflowError:
            full_s = self.max_s
        return full_s * (0.5 + 0.5 * jitter)
