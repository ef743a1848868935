"""Answers that are made once for all callers that ask at about the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from math import inf
from time import monotonic, process_time
from typing import Any, TypeVar

from .response import Refusal

# Making an answer takes at most one part in this many of the process's time. Other calls have turns in between.
REST_FACTOR = 4
# This many different queries share their answers; any other is answered by itself.
MOST_QUERIES = 256
STOPPING = "The server is stopping; ask again when it is back."
AnswerT = TypeVar("AnswerT")


@dataclass(slots=True, eq=False)
class _Query:
    """What is made for one query. `due` has not begun to make its answer, so calls share it; `begun` has. `last` is kept where it
    may be old.
    """

    due: asyncio.Task[Any] | None = None
    begun: asyncio.Task[Any] | None = None
    last: Any = None
    rests_until: float = -inf

    async def run(self, make: Callable[[], Awaitable[AnswerT]], pace_s: float) -> AnswerT:
        if self.begun is not None:
            await asyncio.wait([self.begun])
        await asyncio.sleep(max(self.rests_until - monotonic(), 0.0))
        # Calls from here on need a run that begins later.
        self.begun, self.due = self.due, None
        began, worked_s = monotonic(), process_time()
        try:
            return await make()
        finally:
            self.begun = None
            # The work counts, not the time: a server that was stopped for a minute must not be silent for ten.
            self.rests_until = began + max(pace_s, REST_FACTOR * (process_time() - worked_s))


class SharedAnswers:
    """Gives every caller an answer whose making began after the call, and makes as few answers as possible."""

    def __init__(self) -> None:
        self._queries: dict[Hashable, _Query] = {}
        self._is_stopped = False

    async def get(
        self, query: Hashable, make: Callable[[], Awaitable[AnswerT]], pace_s: float = 0.0, *, may_be_old: bool = False
    ) -> AnswerT:
        """The answer to a query; the error of its making goes to the calls that waited for it, and the next call tries again.

        It is made at the earliest `pace_s` after the last began, and after a rest of four times the processor time that the last
        took. Calls in between share the next. With `may_be_old` they get the last instead. Refusal if the server stops.
        """
        if self._is_stopped:
            raise Refusal(503, STOPPING)
        found = self._find(query)
        if may_be_old and found.last is not None and monotonic() < found.rests_until:
            last: AnswerT = found.last
            return last
        run = found.begun if may_be_old else None
        if run is None:
            run = found.due
        if run is None:
            run = found.due = asyncio.create_task(found.run(make, pace_s))
            # There may be no caller left for an error.
            run.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            answer: AnswerT = await asyncio.shield(run)
        except asyncio.CancelledError:
            if run.cancelled():
                raise Refusal(503, STOPPING) from None
            raise
        found.last = answer if may_be_old else None
        return answer

    def _find(self, query: Hashable) -> _Query:
        if (found := self._queries.get(query)) is not None:
            return found
        if len(self._queries) >= MOST_QUERIES:
            self._queries = {key: each for key, each in self._queries.items() if each.due or each.begun}
        found = _Query()
        if len(self._queries) < MOST_QUERIES:
            self._queries[query] = found
        return found

    def stop(self) -> None:
        """Refuse all calls, and make nothing more."""
        self._is_stopped = True
        for found in self._queries.values():
            for run in filter(None, (found.due, found.begun)):
                run.cancel()
