"""An answer that is made once for all callers that ask at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

from .problems import Refusal

# Making an answer takes at most one part in this many of the process's time. Other calls have turns in between.
REST_FACTOR = 4
# This many different queries share their answers; any other is answered by itself.
MOST_QUERIES = 256
STOPPING = "The server is stopping; ask again when it is back."
AnswerT = TypeVar("AnswerT")


class SharedAnswer(Generic[AnswerT]):
    """Gives every caller an answer whose making began after the call, and makes as few answers as possible.

    A run starts at the earliest `pace_s` after the start of the last, and four times the CPU time of the last run after it.
    Wall time does not count: a server that was stopped for a minute must not be silent for ten. Calls in between share the
    next run. An error goes to the calls that waited for it; the next call tries again.

    With `may_be_old`, calls between two runs do not wait: they get the last answer.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[AnswerT]],
        pace_s: float,
        *,
        may_be_old: bool = False,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.process_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._make = make
        self._pace_s = pace_s
        self._may_be_old = may_be_old
        self._clock = clock
        self._work_clock = work_clock
        self._sleep = sleep
        self._not_before = float("-inf")
        self._last: AnswerT | None = None
        self._current: asyncio.Task[AnswerT] | None = None
        # It has not begun to make its answer.
        self._next: asyncio.Task[AnswerT] | None = None

    async def get(self) -> AnswerT:
        """Return the answer, or raise the error of its making; Refusal if that is stopped."""
        run = self._current if self._may_be_old else None
        if run is None:
            if self._last is not None and self._clock() < self._not_before:
                return self._last
            if self._next is None:
                self._next = asyncio.create_task(self._run(self._current))
                self._next.add_done_callback(_note_error)
            run = self._next
        try:
            return await asyncio.shield(run)
        except asyncio.CancelledError:
            if run.cancelled():
                raise Refusal(503, STOPPING) from None
            raise

    @property
    def is_idle(self) -> bool:
        """Whether nothing is made, or to be made."""
        return self._current is None and self._next is None

    def stop(self) -> None:
        """Refuse the calls that wait."""
        for run in filter(None, (self._current, self._next)):
            run.cancel()

    async def _run(self, before: asyncio.Task[AnswerT] | None) -> AnswerT:
        try:
            if before is not None:
                await asyncio.wait([before])
            while (rest_s := self._not_before - self._clock()) > 0:
                await self._sleep(rest_s)
        except BaseException:
            self._next = None
            raise
        # Calls from here on need a run that begins later.
        self._current, self._next, self._last = self._next, None, None
        began, worked_s = self._clock(), self._work_clock()
        try:
            answer = await self._make()
        finally:
            self._current = None
            self._not_before = began + max(self._pace_s, REST_FACTOR * (self._work_clock() - worked_s))
        if self._may_be_old:
            self._last = answer
        return answer


def _note_error(run: asyncio.Task[Any]) -> None:
    """Take note of an error for which no call may wait any more."""
    if not run.cancelled():
        run.exception()


class SharedAnswers:
    """Answers that are shared by all callers with the same query. A query that is not asked at present makes room for another."""

    def __init__(self) -> None:
        self._by_query: dict[Hashable, SharedAnswer[Any]] = {}
        self._is_stopped = False

    async def get(
        self, query: Hashable, make: Callable[[], Awaitable[AnswerT]], pace_s: float = 0.0, *, may_be_old: bool = False
    ) -> AnswerT:
        """The answer that `make` gives for this query, made once for all that ask meanwhile."""
        if self._is_stopped:
            raise Refusal(503, STOPPING)
        answer: SharedAnswer[AnswerT] | None = self._by_query.get(query)
        if answer is None:
            answer = SharedAnswer(make, pace_s, may_be_old=may_be_old)
            if len(self._by_query) >= MOST_QUERIES:
                self._drop_an_idle_one()
            if len(self._by_query) < MOST_QUERIES:
                self._by_query[query] = answer
        return await answer.get()

    def _drop_an_idle_one(self) -> None:
        idle = next((query for query, answer in self._by_query.items() if answer.is_idle), None)
        if idle is not None:
            del self._by_query[idle]

    def stop(self) -> None:
        """Refuse all calls, and make nothing more."""
        self._is_stopped = True
        for answer in self._by_query.values():
            answer.stop()
