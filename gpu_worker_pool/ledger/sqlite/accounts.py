"""Accounting of leases, read from a journal's file beside its writer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gpu_worker_pool.ledger.accounts import USAGE_TOTALS, Accounts, Ask
from gpu_worker_pool.ledger.sql_rows import load_queries

from .faults import journal_errors
from .file import connect

_QUERIES = load_queries(__package__)
QUERIES = {**_QUERIES, "usage": f"{_QUERIES['usage']}\n{USAGE_TOTALS}"}


class SqliteAccounts(Accounts):
    def __init__(self, path: Path) -> None:
        self._path = path.absolute()

    @property
    def where(self) -> str:
        return str(self._path)

    @contextmanager
    def _one_moment(self) -> Iterator[Ask]:
        with journal_errors(self._path), closing(connect(self._path, "ro")) as connection:
            connection.execute("BEGIN")
            yield lambda query, *arguments: connection.execute(QUERIES[query], arguments).fetchall()
