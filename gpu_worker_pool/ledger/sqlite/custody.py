"""The file in which a box of a fleet keeps its leases: texts by kind and id, in SQLite.

It is not the pool's history: the leader tells what is missing. So a damaged file is set aside, and the box goes on with
a new one. For the same reason a write does not wait for the disk. It outlives the death of this process. A power cut may take
back the last writes, in order: then the leader tells of the grants, and a lease whose end is lost has its TTL once more.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

from gpu_worker_pool.ledger.journal import JournalDamaged

from .file import SqliteFile

logger = logging.getLogger(__name__)

SCHEMA = "CREATE TABLE kept (kind TEXT, id TEXT, body TEXT NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (kind, id));"
PUT = "INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?)"
DELETE = "DELETE FROM kept WHERE kind = ? AND id = ?"

# By kind and id.
Rows = dict[tuple[str, str], str]


class CustodyFile:
    """`rows` are what is on the disk. JournalInUse if another process has the file. All calls block."""

    def __init__(self, path: Path) -> None:
        self.rows: Rows = {}
        self._file = SqliteFile(path, SCHEMA, durability="normal", what="file of this box's leases")
        try:
            with self._file.errors():
                if not self._file.path.exists():
                    self._file.replace(lambda _: None)
                try:
                    self._open()
                except JournalDamaged as error:
                    self._start_again(error, {})
        except BaseException:
            self.close()
            raise

    def write(self, changes: Mapping[tuple[str, str], str | None]) -> None:
        """Put these texts, or delete those that are None: all or none. JournalError if that cannot be done."""
        rows = {key: body for key, body in {**self.rows, **changes}.items() if body is not None}
        try:
            with self._file.transaction() as connection:
                _write(connection, changes)
        except JournalDamaged as error:
            with self._file.errors():
                self._start_again(error, rows)
        self.rows = rows

    def close(self) -> None:
        self._file.close()

    def _start_again(self, error: JournalDamaged, rows: Rows) -> None:
        aside = self._file.replace(lambda connection: _write(connection, rows))
        logger.error(
            "the leases that this box keeps could not be read (%s); the damaged file is kept as %s. %s", error, aside,
            "What was known is written again" if rows else "The leader tells this box which leases it has",
        )  # fmt: skip
        self._open()

    def _open(self) -> None:
        connection = self._file.open()
        with self._file.errors(is_read=True):
            rows: Rows = {}
            for kind, id_, body, crc in connection.execute("SELECT kind, id, body, crc FROM kept"):
                if crc != _crc(kind, id_, body):
                    raise ValueError(f"the row {kind} {id_} is not what was written")
                rows[kind, id_] = body
            self.rows = rows


def _write(connection: sqlite3.Connection, changes: Mapping[tuple[str, str], str | None]) -> None:
    for (kind, id_), body in changes.items():
        if body is None:
            connection.execute(DELETE, (kind, id_))
        else:
            connection.execute(PUT, (kind, id_, body, _crc(kind, id_, body)))


def _crc(kind: str, id_: str, body: str) -> int:
    return crc32(f"{kind}\n{id_}\n{body}".encode())
