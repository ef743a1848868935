"""Accounting of ended leases, read from a journal's file beside its writer."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from gpu_worker_pool.ledger.accounts import LEASES_AT_ONCE, PAUSE_S, Accounts
from gpu_worker_pool.ledger.faults import journal_errors
from gpu_worker_pool.ledger.sql_files import load_queries

BUSY_TIMEOUT_S = 1.0


class SqliteAccounts(Accounts):
    def __init__(self, path: Path) -> None:
        self._path = path.absolute()

    @property
    def where(self) -> str:
        return str(self._path)

    @contextmanager
    def _one_moment(self) -> Iterator[_EndedInFile]:
        with journal_errors(self._path), closing(self._connect()) as connection:
            connection.execute("BEGIN")
            yield _EndedInFile(connection)

    def _connect(self) -> sqlite3.Connection:
        # mode=ro: it must not create a file, and closing must not fold the writer's log into it.
        return sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)


class _EndedInFile:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._sql = load_queries(__package__)
        (complete_since,) = connection.execute(self._sql["complete_since"]).fetchone()
        self.complete_since = None if complete_since is None else float(complete_since)

    def read(self, query: str, arguments: tuple[float, ...], at_once: int = LEASES_AT_ONCE) -> Iterator[Any]:
        rows = self._connection.execute(self._sql[query], arguments)
        while some := rows.fetchmany(at_once):
            yield from some
            time.sleep(PAUSE_S)
