"""Accounting of leases, read from a fleet's database beside its writer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpu_worker_pool.ledger.accounts import Accounts, Ask, LiveUse, accounting_queries

from .connection import CLOSE_TIMEOUT_S
from .faults import ASYNCPG_ERRORS, as_journal_error
from .hosts import RawConnection, connect
from .rows import storable
from .url import DatabaseUrl

QUERY_TIMEOUT_S = 60.0

QUERIES = accounting_queries(__package__)


class PostgresAccounts(Accounts):
    """Each call has an event loop and a connection of its own."""

    def __init__(self, url: DatabaseUrl, pool: str) -> None:
        super().__init__(f"in the database {url}")
        self._url = url
        self._pool = pool

    def _as_json(self, live: Sequence[LiveUse]) -> str:
        return json.dumps([[storable(part) for part in lease] for lease in live])

    @contextmanager
    def _one_moment(self) -> Iterator[Ask]:
        with asyncio.Runner() as runner:
            raw = runner.run(connect(self._url))

            def ask(query: str, *arguments: object) -> list[Any]:
                return runner.run(raw.fetch(QUERIES[query], self._pool, *arguments, timeout=QUERY_TIMEOUT_S))

            try:
                # The moment is that of the first query.
                runner.run(raw.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"))
                yield ask
            except ASYNCPG_ERRORS as error:
                raise as_journal_error(error, self._url) from error
            finally:
                runner.run(_close(raw))


async def _close(raw: RawConnection) -> None:
    try:
        await raw.close(timeout=CLOSE_TIMEOUT_S)
    except ASYNCPG_ERRORS:
        raw.terminate()
