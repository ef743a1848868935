"""An answer that is made once for all callers that ask at about the same time."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from .problems import Refusal

# A body up to this size is compressed in the event loop: a thread would take longer.
SMALL_BYTES = 4096
COMPRESSION = 1
# Making answers takes at most one part in so many of the process's time. Other calls have turns in between.
REST_FACTOR = 4
STOPPING = "The server is stopping; ask again when it is back."


@dataclass(frozen=True, slots=True)
class Body:
    plain: bytes
    gzipped: bytes = b""

    @classmethod
    async def of(cls, plain: bytes, *, is_compressed: bool = True) -> Body:
        """Compress the answer; a large one in a thread."""
        if not is_compressed:
            return cls(plain)
        if len(plain) <= SMALL_BYTES:
            return cls(plain, _compress(plain))
        return cls(plain, await asyncio.to_thread(_compress, plain))


class _Run:
    """The callers that wait for one run."""

    def __init__(self) -> None:
        self._callers: dict[asyncio.Future[Body], None] = {}

    def __len__(self) -> int:
        return len(self._callers)

    async def wait(self) -> Body:
        caller: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self._callers[caller] = None
        try:
            return await caller
        finally:
            self._callers.pop(caller, None)

    def end(self, outcome: Body | Exception) -> None:
        """Answer all callers that have not left."""
        callers, self._callers = self._callers, {}
        for caller in callers:
            if caller.done():
                continue
            if isinstance(outcome, Body):
                caller.set_result(outcome)
            else:
                caller.set_exception(outcome)


class SharedAnswer:
    """Gives every caller an answer whose making began after the call, and makes as few answers as possible.

    A run starts at the earliest `pace_s` after the start of the last, and four times the CPU time of the last run after it.
    Wall time does not count: a server that was stopped for a minute must not be silent for ten. Calls in between share the
    next run. Nothing is made while no call waits. An error goes to the calls that waited for it; the next call tries again.

    With `may_be_old`, calls between two runs do not wait: they get the last answer.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[bytes]],
        pace_s: float,
        *,
        may_be_old: bool = False,
        is_compressed: bool = True,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.process_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._make = make
        self._pace_s = pace_s
        self._may_be_old = may_be_old
        self._is_compressed = is_compressed
        self._last: Body | None = None
        self._clock = clock
        self._work_clock = work_clock
        self._sleep = sleep
        self._not_before = float("-inf")
        self._next: _Run | None = None
        self._current: _Run | None = None
        self._maker: asyncio.Task[None] | None = None
        self._is_closed = False

    async def get(self) -> Body:
        """Return the answer, or raise the error of its making; Refusal after `close`."""
        if self._is_closed:
            raise Refusal(503, STOPPING)
        if self._may_be_old:
            if self._current is not None:
                return await self._current.wait()
            if self._last is not None and self._clock() < self._not_before:
                return self._last
        if self._next is None:
            self._next = _Run()
        mine = self._next
        if self._maker is None:
            self._maker = asyncio.create_task(self._make_while_wanted())
        return await mine.wait()

    @property
    def is_idle(self) -> bool:
        """Whether no call waits, and nothing is made."""
        return self._maker is None

    def stop(self) -> None:
        """Refuse all calls, and make nothing more."""
        self._is_closed = True
        self._stop_waiting()
        if self._maker is not None:
            self._maker.cancel()

    async def close(self) -> None:
        self.stop()
        if self._maker is not None:
            await asyncio.wait([self._maker])

    def _stop_waiting(self) -> None:
        for run in filter(None, (self._current, self._next)):
            run.end(Refusal(503, STOPPING))

    async def _make_while_wanted(self) -> None:
        try:
            while self._next:
                rest_s = self._not_before - self._clock()
                if rest_s > 0:
                    await self._sleep(rest_s)
                    continue  # all callers may have left meanwhile
                # Calls from here on need a run that begins later.
                self._current, self._next = self._next, None
                began, worked_s = self._clock(), self._work_clock()
                outcome = await self._outcome()
                self._last = outcome if self._may_be_old and isinstance(outcome, Body) else None
                self._current.end(outcome)
                self._current = None
                self._not_before = began + max(self._pace_s, REST_FACTOR * (self._work_clock() - worked_s))
        finally:
            # No call waits here, unless the task was cancelled.
            self._stop_waiting()
            self._current = self._next = self._maker = None

    async def _outcome(self) -> Body | Exception:
        try:
            return await Body.of(await self._make(), is_compressed=self._is_compressed)
        except Exception as error:  # noqa: BLE001 - raised in all calls that wait
            return error


def _compress(plain: bytes) -> bytes:
    return gzip.compress(plain, COMPRESSION, mtime=0)


class SharedAnswers:
    """Answers that are shared by all callers with the same query. At most so many different queries share; any other
    is answered by itself. A query that is not asked at present makes room for another.
    """

    def __init__(
        self,
        pace_s: float = 0.0,
        most: int = 16,
        *,
        may_be_old: bool = False,
        is_compressed: bool = False,
    ) -> None:
        self._pace_s = pace_s
        self._most = most
        self._may_be_old = may_be_old
        self._is_compressed = is_compressed
        self._by_query: dict[Hashable, SharedAnswer] = {}
        self._is_stopped = False

    async def get(self, query: Hashable, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """The answer that `make` gives for this query, made once for all that ask meanwhile."""
        return (await self.get_body(query, make)).plain

    async def get_body(self, query: Hashable, make: Callable[[], Awaitable[bytes]]) -> Body:
        answer = self._by_query.get(query)
        if answer is None:
            if self._is_stopped:
                raise Refusal(503, STOPPING)
            if len(self._by_query) >= self._most:
                self._drop_an_idle_one()
            if len(self._by_query) >= self._most:
                return await Body.of(await make(), is_compressed=self._is_compressed)
            answer = self._by_query[query] = SharedAnswer(
                make,
                self._pace_s,
                may_be_old=self._may_be_old,
                is_compressed=self._is_compressed,
            )
        return await answer.get()

    def _drop_an_idle_one(self) -> None:
        """Drop the answer that was made first of those that are not asked for."""
        idle = next((query for query, answer in self._by_query.items() if answer.is_idle), None)
        if idle is not None:
            del self._by_query[idle]

    def stop(self) -> None:
        self._is_stopped = True
        for answer in self._by_query.values():
            answer.stop()

    async def close(self) -> None:
        for answer in self._by_query.values():
            await answer.close()
