"""The work of one turn of the event loop, bounded: while a turn lasts, no socket is read and no caller is answered.

What is left is done in the next turns. Calls are carried out in the order in which they came.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.events import Event

# Commands of callers, and passes over the queue (one grant each, if GPUs are shared).
MOST_COMMANDS = 12
MOST_PASSES = 24
# Processor time for both. The last of them may take longer.
TURN_S = 0.02
# No honest caller has as many calls waiting; more would cost memory, and only wait for each other.
MOST_OF_ONE_CALLER = 1000


class LoopBudget:
    """What is left of the present turn. `go_on` is called at the beginning of the turn after one that had work. `work_clock`
    is the processor time of the thread that does the work.
    """

    def __init__(self, go_on: Callable[[], None], work_clock: Callable[[], float] = time.thread_time) -> None:
        self._go_on = go_on
        self._work_clock = work_clock
        self.commands_left, self.passes_left, self._left_s = MOST_COMMANDS, MOST_PASSES, TURN_S
        self._began = 0.0
        self._is_counted = False

    @property
    def is_spent(self) -> bool:
        return self.commands_left <= 0 or self._left_s <= 0

    def has_time(self) -> bool:
        """Whether the present work may go on in this turn."""
        return self._work_clock() - self._began < self._left_s

    @contextmanager
    def work(self) -> Iterator[None]:
        """Count what is done here as work of this turn."""
        self.count()
        self._began = self._work_clock()
        try:
            yield
        finally:
            self._left_s -= self._work_clock() - self._began

    def count(self) -> None:
        """Make the next turn of the loop another turn."""
        if not self._is_counted:
            self._is_counted = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_counted = False
        self.commands_left, self.passes_left, self._left_s = MOST_COMMANDS, MOST_PASSES, TURN_S
        self._go_on()


class TooManyCalls(Exception):  # noqa: N818 - a state, not a mistake
    def __init__(self, most: int) -> None:
        super().__init__(
            f"{most} calls of this caller wait for their turn already, which is the limit; ask again later."
        )


class WaitingCall:
    """A call, which is `done` when the `events` that its command led to are written, or it is known that they are not."""

    def __init__(self, command: cmd.Command, caller: Hashable) -> None:
        self.command = command
        self.caller = caller
        self.events: list[Event] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class WaitingCalls:
    """First come, first served."""

    def __init__(self) -> None:
        self._calls: deque[WaitingCall] = deque()
        self._of_caller: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._calls)

    def join(self, call: WaitingCall) -> None:
        """Put a call at the end; TooManyCalls if too many of its caller wait."""
        if self._of_caller[call.caller] >= MOST_OF_ONE_CALLER:
            raise TooManyCalls(MOST_OF_ONE_CALLER)
        self._of_caller[call.caller] += 1
        self._calls.append(call)

    def pop(self) -> WaitingCall:
        call = self._calls.popleft()
        self._of_caller[call.caller] -= 1
        if not self._of_caller[call.caller]:
            del self._of_caller[call.caller]
        return call
