"""Accounting of ended leases, read from a fleet's database beside its writer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gpu_worker_pool.ledger.accounts import LEASES_AT_ONCE, PAUSE_S, Accounts
from gpu_worker_pool.ledger.sql_files import load_queries

from .connection import CLOSE_TIMEOUT_S
from .faults import ASYNCPG_ERRORS, as_journal_error
from .hosts import RawConnection, connect
from .url import DatabaseUrl

# A page of rows that takes longer than this fails; the whole may take any time.
PAGE_TIMEOUT_S = 10.0

T = TypeVar("T")


class PostgresAccounts(Accounts):
    """Each call has an event loop and a connection of its own."""

    def __init__(self, url: DatabaseUrl, pool: str) -> None:
        self._url = url
        self._pool = pool

    @property
    def where(self) -> str:
        return f"in the database {self._url}"

    @contextmanager
    def _one_moment(self) -> Iterator[_EndedInDatabase]:
        with asyncio.Runner() as runner:
            raw = runner.run(connect(self._url))
            try:
                leases = _EndedInDatabase(runner, raw, self._pool)
                leases.begin()
                yield leases
            except ASYNCPG_ERRORS as error:
                raise as_journal_error(error, self._url) from error
            finally:
                runner.run(_close(raw))


class _EndedInDatabase:
    def __init__(self, runner: asyncio.Runner, raw: RawConnection, pool: str) -> None:
        self._runner = runner
        self._raw = raw
        self._pool = pool
        self._sql = load_queries(__package__)
        self.complete_since: float | None = None

    def begin(self) -> None:
        """The moment is that of the first query."""
        self._run(self._raw.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"))
        self.complete_since = self._run(self._raw.fetchval(self._sql["complete_since"], self._pool))

    def read(self, query: str, arguments: tuple[float, ...], at_once: int = LEASES_AT_ONCE) -> Iterator[Any]:
        cursor = self._run(self._open(query, arguments))
        while some := self._run(cursor.fetch(at_once, timeout=PAGE_TIMEOUT_S)):
            yield from some
            self._run(asyncio.sleep(PAUSE_S))

    async def _open(self, query: str, arguments: tuple[float, ...]) -> Any:
        return await self._raw.cursor(self._sql[query], self._pool, *map(float, arguments), timeout=PAGE_TIMEOUT_S)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)


async def _close(raw: RawConnection) -> None:
    try:
        await raw.close(timeout=CLOSE_TIMEOUT_S)
    except ASYNCPG_ERRORS:
        raw.terminate()
