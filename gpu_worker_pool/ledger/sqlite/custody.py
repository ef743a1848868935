"""The file in which a box of a fleet keeps its leases: texts by kind and id, in SQLite.

It is not the pool's history: the leader tells what is missing. So a damaged file is quarantined, and the box goes on with
a new one. For the same reason a write does not wait for the disk. It outlives the death of this process. A power cut may take
back the last writes, in order: then the leader tells of the grants, and a lease whose end is lost has its TTL once more.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from zlib import crc32

from gpu_worker_pool.ledger.faults import is_environmental, journal_errors
from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError
from gpu_worker_pool.ledger.state_dir import check_files, make_state_dir

from . import quarantine
from .journal import connect
from .lock import FileLock, JournalLock
from .migrations import create_private, version_of

logger = logging.getLogger(__name__)

VERSION = 1
TABLE = "CREATE TABLE kept (kind TEXT, id TEXT, body TEXT NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (kind, id))"
PUT = (
    "INSERT INTO kept VALUES (?, ?, ?, ?) ON CONFLICT (kind, id) DO UPDATE SET body = excluded.body, crc = excluded.crc"
)
DELETE = "DELETE FROM kept WHERE kind = ? AND id = ?"

# By kind and id.
Rows = dict[tuple[str, str], str]


class CustodyFile:
    """`rows` are what is on the disk. JournalInUse if another process has the file. All calls block."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._connection: sqlite3.Connection | None = None
        self._file_lock: FileLock | None = None
        self._inode = 0
        self.rows: Rows = {}
        with journal_errors(self._path):
            make_state_dir(self._path.parent)
            check_files(*(Path(f"{self._path}{end}") for end in ("", ".lock", "-wal", "-shm")))
            self._lock = JournalLock(self._path)
            try:
                self._open_or_replace()
            except BaseException:
                self.close()
                raise

    def write(self, changes: Mapping[tuple[str, str], str | None]) -> None:
        """Put these texts, or delete those that are None: all or none. JournalError if that cannot be done."""
        try:
            with journal_errors(self._path):
                self._write(self._writable(), changes)
        except JournalDamaged as error:
            rows = {key: body for key, body in {**self.rows, **changes}.items() if body is not None}
            with journal_errors(self._path):
                self._start_again(str(error), rows)
        for key, body in changes.items():
            if body is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = body

    def close(self) -> None:
        self._disconnect()
        self._lock.release()

    def _open_or_replace(self) -> None:
        if not self._path.exists():
            # A log without its database would be taken for the log of the new one.
            quarantine.isolate(self._path)
            self._create({})
        try:
            self._open()
        except JournalError:
            raise
        except (sqlite3.Error, ValueError) as error:
            if isinstance(error, sqlite3.Error) and is_environmental(error):
                raise
            self._start_again(str(error), {})

    def _start_again(self, why: str, rows: Rows) -> None:
        # Renamed before it is closed: on closing, SQLite folds the log into the file, unless the file was moved.
        aside = quarantine.isolate(self._path)
        self._disconnect()
        Path(f"{self._path}-shm").unlink(missing_ok=True)
        logger.error(
            "the leases that this box keeps could not be read (%s); the damaged file is kept as %s. %s", why, aside,
            "What was known is written again" if rows else "The leader tells this box which leases it has",
        )  # fmt: skip
        self._create(rows)
        self._open()

    def _create(self, rows: Rows) -> None:
        """Build the file under another name, so that a file at the final path is complete."""
        new = Path(f"{self._path}.new")
        for suffix in ("", "-journal", "-wal", "-shm"):
            Path(f"{new}{suffix}").unlink(missing_ok=True)
        create_private(new)
        with closing(connect(new)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(TABLE)
            connection.execute(f"PRAGMA user_version = {VERSION}")
            self._write(connection, rows)
        new.rename(self._path)
        quarantine.sync_folder(self._path.parent)

    def _open(self) -> None:
        if self._file_lock is None:
            self._file_lock = FileLock(self._path)
        connection = connect(self._path)
        self._connection, self._inode = connection, self._path.stat().st_ino
        if (version := version_of(connection)) > VERSION:
            raise JournalError(
                f"{self._path} was written by a newer version of this program (its table is of version {version}, this one "
                f"knows {VERSION}): install the newer one again, or move the file away"
            )
        if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise ValueError("its pages contradict each other")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        rows: Rows = {}
        for kind, id_, body, crc in connection.execute("SELECT kind, id, body, crc FROM kept"):
            if crc != _crc(kind, id_, body):
                raise ValueError(f"the row {kind} {id_} is not what was written")
            rows[kind, id_] = body
        self.rows = rows

    def _writable(self) -> sqlite3.Connection:
        """The connection, if its file is still in place: SQLite would go on writing to a deleted file."""
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            inode = None
        if inode != self._inode or self._connection is None:
            raise JournalDamaged(f"{self._path} was deleted, moved or replaced while it was in use")
        return self._connection

    @staticmethod
    def _write(connection: sqlite3.Connection, changes: Mapping[tuple[str, str], str | None]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for (kind, id_), body in changes.items():
                if body is None:
                    connection.execute(DELETE, (kind, id_))
                else:
                    connection.execute(PUT, (kind, id_, body, _crc(kind, id_, body)))
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        # After SQLite has closed the file: see FileLock.
        if self._file_lock is not None:
            self._file_lock.release()
            self._file_lock = None


def _crc(kind: str, id_: str, body: str) -> int:
    return crc32(f"{kind}\n{id_}\n{body}".encode())
