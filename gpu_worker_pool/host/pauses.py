"""Pauses of a thread with much work, which keeps the event loop from the interpreter while it runs.

The loop gives the interpreter up at every call of the system, and gets it back only when the thread does too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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
