"""A connection to a fleet's database that opens itself again after it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import asyncpg

from gpu_worker_pool.ledger.journal import JournalError, OutcomeUnknown

from .faults import ASYNCPG_ERRORS, as_journal_error, is_outcome_unknown
from .hosts import CONNECT_TIMEOUT_S, RawConnection, connect
from .url import DatabaseUrl

CLOSE_TIMEOUT_S = 1.0

T = TypeVar("T")
Work = Callable[[RawConnection], Coroutine[Any, Any, T]]


class DatabaseConnection:
    """Carries out one piece of work at a time; others wait in line. After a fault, the next piece connects again.

    A piece that takes longer than its timeout costs the connection. It is cut without asking the server to cancel:
    PostgreSQL lets a cancelled commit happen before its synchronous standby has it.
    """

    def __init__(self, url: DatabaseUrl, on_open: Work[None] | None = None) -> None:
        self._url = url
        self._on_open = on_open
        self._raw: RawConnection | None = None
        self._line = asyncio.Lock()
        self._is_closed = False
        # When the server started that this is, or was, a connection to.
        self.server_began: object = None

    async def read(self, work: Work[T], timeout_s: float) -> T:
        """Do work that changes nothing."""
        return await self._run(work, timeout_s, JournalError)

    async def change(self, work: Work[T], timeout_s: float) -> T:
        """Do work that changes something: OutcomeUnknown if the answer was lost, JournalError if nothing changed."""
        return await self._run(work, timeout_s, OutcomeUnknown)

    async def close(self) -> None:
        self._is_closed = True
        raw, self._raw = self._raw, None
        if raw is not None:
            if not self._line.locked():
                with suppress(*ASYNCPG_ERRORS):  # it is over either way
                    await raw.close(timeout=CLOSE_TIMEOUT_S)
            raw.terminate()

    def leave(self) -> None:
        """Cut the connection, also during a piece of work, which fails. The next piece connects again."""
        self._cut()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "not connected" if self._raw is None else "connected"
        return f"<DatabaseConnection {self._url}: {state}>"

    async def _run(self, work: Work[T], timeout_s: float, unknown: type[JournalError]) -> T:
        async with self._line:
            raw = await self._connected()
            try:
                return await _within(timeout_s, work, raw)
            except ASYNCPG_ERRORS as error:
                is_unknown = is_outcome_unknown(error)
                if is_unknown or isinstance(error, asyncpg.ReadOnlySQLTransactionError):
                    self._cut()
                raise as_journal_error(error, self._url, unknown if is_unknown else JournalError) from error
            except asyncio.CancelledError:
                self._cut()
                raise

    async def _connected(self) -> RawConnection:
        self._must_not_be_closed()
        if self._raw is not None and not self._raw.is_closed():
            return self._raw
        self._cut()
        raw = self._raw = await connect(self._url)
        try:
            self._must_not_be_closed()  # meanwhile
            self.server_began = await _within(CONNECT_TIMEOUT_S, _server_began, raw)
            if self._on_open is not None:
                await _within(CONNECT_TIMEOUT_S, self._on_open, raw)
        except ASYNCPG_ERRORS as error:
            self._cut()
            raise as_journal_error(error, self._url) from error
        except BaseException:
            self._cut()
            raise
        return raw

    def _cut(self) -> None:
        if self._raw is not None:
            raw, self._raw = self._raw, None
            raw.terminate()

    def _must_not_be_closed(self) -> None:
        if self._is_closed:
            raise JournalError(f"the database {self._url} is closed; open it again to go on")


async def _server_began(raw: RawConnection) -> object:
    return await raw.fetchval("SELECT pg_postmaster_start_time()")


async def _within(timeout_s: float, work: Work[T], raw: RawConnection) -> T:
    """Await the work, or cut the connection after the timeout. Cancelling the work itself would make asyncpg ask the server
    to cancel it.
    """
    task = asyncio.ensure_future(work(raw))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            raw.terminate()
            task.add_done_callback(_look_at)
    if not task.done():
        raise TimeoutError
    return task.result()


def _look_at(task: asyncio.Future[Any]) -> None:
    """Take note of the error, which is expected, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()
