"""The work of one turn of the event loop, bounded: while a turn lasts, no caller is answered and no heartbeat is taken.

What is left is done in the next turns, in the same order.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import inf

from gpu_worker_pool.core.model import events as ev

from .fair_queue import FairQueue, WaitingCall
from .hearing import Hearing
from .short_wait import ShortWait, wake

# Commands of callers, passes over the queue (one grant each, if GPUs are shared) and callers that are answered.
MOST_COMMANDS = 12
IDS_PER_COMMAND = 100  # so many ids in a heartbeat count as a command
MOST_PASSES = 24
MOST_ANSWERED = 64
# Processor time for commands and passes. The last of them may take longer.
TURN_S = 0.02

Caller = asyncio.Future[None]


class Turn:
    """What is left of the present turn, and the callers that wait for a later one. `work_clock` is the processor time of
    the thread that does the work.
    """

    def __init__(self, hearing: Hearing, work_clock: Callable[[], float] = time.thread_time) -> None:
        self.passes_left = MOST_PASSES
        self._commands_left = MOST_COMMANDS
        self._work_clock = work_clock
        self._left_s = TURN_S
        self._until = self._surely_until = -inf
        self._work_began = 0.0
        self._is_counted = False
        self._began = 0.0
        self._held_back = FairQueue()
        # Calls that had their turn, but no time was left in it.
        self._again: deque[asyncio.Future[None]] = deque()
        self._hearing = hearing
        self._to_answer: deque[Caller] = deque()

    async def admit(self, weight: int, caller: Hashable = None, arrived_at: float | None = None) -> None:
        """Wait for a turn that has time for a command of this weight. Callers take turns; the commands of one are carried
        out in order, light heartbeats first. TooManyCalls if too many of this caller wait.

        `arrived_at` is the time at which a heartbeat arrived. It must be carried out at once after this returns.
        """
        self._count()
        if not self._held_back and not self._again and self._commands_left > 0 and self._left_s > 0:
            self._commands_left -= weight
            return
        call = WaitingCall(weight, arrived_at, ShortWait())
        self._held_back.join(caller, call)
        self._hearing.add(call, arrived_at)
        try:
            await call.turn
        finally:
            self._hearing.discard(call)
        # What was before it in this turn took long. A heartbeat takes little.
        while self._left_s <= 0 and arrived_at is None:
            again = ShortWait()
            self._again.append(again)
            self._count()
            await again

    def begin_work(self) -> None:
        """Begin some work of this turn, which is counted until `end_work`."""
        self._work_began = self._work_clock()
        self._until = self._work_began + self._left_s
        # Processor time passes no faster than this clock, which costs a twentieth of a look at processor time.
        self._surely_until = time.perf_counter() + self._left_s if self._work_clock is time.thread_time else -inf

    def end_work(self) -> None:
        self._left_s -= self._work_clock() - self._work_began
        self._count()

    def has_time(self) -> bool:
        """Whether the present work may go on in this turn."""
        return time.perf_counter() < self._surely_until or self._work_clock() < self._until

    @property
    def is_over(self) -> bool:
        """Whether this turn has no time for more work."""
        return self._left_s <= 0

    def look(self) -> None:
        """Note how long this turn has kept the event loop from its sockets."""
        if self._is_counted:
            self._hearing.note_lateness(time.monotonic() - self._began)

    def answer(self, callers: Iterable[Caller], waiters: Sequence[Caller] = ()) -> None:
        """Wake some of the callers, and the others in the next turns. Waiters, which have tasks, go first: their GPUs stand
        still until they know of the grant.
        """
        if waiters:
            self.answer(waiters)
            asyncio.get_running_loop().call_soon(self.answer, callers)
            return
        is_under_way = bool(self._to_answer)
        self._to_answer.extend(callers)
        if not is_under_way:
            self._answer_some()

    def _answer_some(self) -> None:
        try:
            for _ in range(min(len(self._to_answer), MOST_ANSWERED)):
                wake(self._to_answer.popleft())
        finally:  # the fault of one call keeps no other from its answer
            if self._to_answer:
                asyncio.get_running_loop().call_soon(self._answer_some)

    def _count(self) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._began = time.monotonic()
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self.look()
        self._is_counted = False
        self._commands_left, self.passes_left, self._left_s = MOST_COMMANDS, MOST_PASSES, TURN_S
        # A call without a task does its work here, and may leave no time. The next one would line up again, behind the others.
        while self._again and self._commands_left > 0 and not self.is_over:
            self._wake(self._again.popleft(), 1)
        while self._held_back and self._commands_left > 0:
            call = self._held_back.pop()
            self._wake(call.turn, call.weight)
        if self._held_back or self._again:
            self._count()

    def _wake(self, turn: asyncio.Future[None], weight: int) -> None:
        if not turn.done():  # else the caller has left
            self._commands_left -= weight
            wake(turn)


class Waiters:
    """The callers that wait for something to happen to a lease."""

    def __init__(self) -> None:
        # Ordered sets: a caller leaves the lines of a thousand leases without a search in each.
        self._by_lease: dict[str, dict[Caller, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_lease)

    def __len__(self) -> int:
        return sum(map(len, self._by_lease.values()))

    async def wait(self, lease_ids: Sequence[str], timeout_s: float, gone: Caller | None = None) -> None:
        """Wait until something happens to one of these leases, or until the timeout, or until the client is gone."""
        loop = asyncio.get_running_loop()
        waiter: Caller = loop.create_future()

        def wake(_: Caller | None = None) -> None:
            if not waiter.done():
                waiter.set_result(None)

        for lease_id in lease_ids:
            self._by_lease.setdefault(lease_id, {})[waiter] = None
        timer = loop.call_later(timeout_s, wake)
        if gone is not None:
            gone.add_done_callback(wake)
        try:
            await waiter
        finally:
            timer.cancel()
            if gone is not None:
                gone.remove_done_callback(wake)
            for lease_id in lease_ids:
                waiters = self._by_lease.get(lease_id)
                if waiters is not None:
                    waiters.pop(waiter, None)
                    if not waiters:
                        del self._by_lease[lease_id]

    def pop(self, lease_id: str) -> list[Caller]:
        return list(self._by_lease.pop(lease_id, ()))

    def pop_all(self, news: Iterable[ev.Event]) -> list[Caller]:
        """The callers to whose leases these events have happened."""
        told: list[Caller] = []
        for event in news:
            if isinstance(event, ev.LeaseGranted | ev.LeaseWarned | ev.LeaseEnded):
                told += self.pop(event.lease_id)
        return told

    def release_all(self) -> None:
        for waiters in self._by_lease.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
