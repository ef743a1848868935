"""Splits long work into pieces, so that nothing waits for the whole of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

# The longest that a piece of such work holds the event loop. Work that is shorter, as the pool of an ordinary box, is
# not split and shows one moment.
LOOP_SLICE_S = 0.0005
# The same while the loop is busy, so that the work does not take for ever.
BUSY_SLICE_S = 0.001
# Others have so many turns of the loop between two pieces, or so many times as long as a piece. A lease call takes about
# ten turns: it must not wait for a piece in each.
OTHERS_SHARE = 4

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]
ItemT = TypeVar("ItemT")


class LoopShare:
    """For work in the event loop. Only CPU time counts: time that the machine gave to other programs does not."""

    def __init__(self, clock: Clock = time.thread_time) -> None:
        self._clock = clock
        self._slice_s = LOOP_SLICE_S
        self._began = clock()

    async def yield_if_due(self) -> None:
        now = self._clock()
        if now - self._began < self._slice_s:
            return
        others_s = 0.0
        for _ in range(OTHERS_SHARE):
            await asyncio.sleep(0)
            others_s = self._clock() - now
            if others_s >= OTHERS_SHARE * self._slice_s:
                break
        self._slice_s = min(max(others_s / OTHERS_SHARE, LOOP_SLICE_S), BUSY_SLICE_S)
        self._began = self._clock()


class BackgroundShare(LoopShare):
    """For work that may take its time, as the data of pages. Others have so many times as long as each piece, whether or not
    they have something to do in the loop: a lease may wait for a thread, which needs the interpreter too. So such work slows
    every lease a little, and none much.
    """

    def __init__(self, clock: Clock = time.thread_time, sleep: Sleep = asyncio.sleep) -> None:
        super().__init__(clock)
        self._sleep = sleep

    async def yield_if_due(self) -> None:
        worked_s = self._clock() - self._began
        if worked_s >= self._slice_s:
            await self._sleep(OTHERS_SHARE * worked_s)
            self._began = self._clock()


def in_turns(most: int, call: Callable[[ItemT], object], items: Iterable[ItemT]) -> None:
    """Call it with so many of the items now, and with the others in the next turns of the event loop, in order."""
    left = deque(items)

    def call_some() -> None:
        for _ in range(min(most, len(left))):
            call(left.popleft())
        if left:
            asyncio.get_running_loop().call_soon(call_some)

    call_some()


class TurnQueue:
    """Calls functions in order, so many in each turn of the event loop, from the next turn on."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left: deque[Callable[[], object]] = deque()
        self._is_waiting = False

    def add(self, call: Callable[[], object]) -> None:
        self._left.append(call)
        self._go_on()

    def _go_on(self) -> None:
        if self._left and not self._is_waiting:
            self._is_waiting = True
            asyncio.get_running_loop().call_soon(self._call_some)

    def _call_some(self) -> None:
        self._is_waiting = False
        try:
            for _ in range(min(self._most, len(self._left))):
                self._left.popleft()()
        finally:
            self._go_on()


class TurnShare:
    """For much short work of many tasks: so much of it is done in one turn of the event loop, and the rest in the next
    ones, in the same order.
    """

    def __init__(self, most_s: float, clock: Clock = time.thread_time) -> None:
        self._most_s = self._left_s = most_s
        self._clock = clock
        self._is_counted = False

    async def turn(self) -> None:
        """Wait for a turn that has time left."""
        while self._left_s <= 0:  # noqa: ASYNC110 - each turn of the loop has new time
            await asyncio.sleep(0)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Count what is done here as work of this turn."""
        if not self._is_counted:
            self._is_counted = True
            asyncio.get_running_loop().call_soon(self._start)
        began = self._clock()
        try:
            yield
        finally:
            self._left_s -= self._clock() - began

    def _start(self) -> None:
        self._left_s, self._is_counted = self._most_s, False
