"""The journal of a server: a SQLite file that one process writes.

A file is built under another name and moved into place once it is complete. So a file without tables at the final path
is damaged, not new. See `Journal` for the contract.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from time import time
from typing import Literal

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.codec import decode_ended, decode_event
from gpu_worker_pool.ledger.failpoints import reach
from gpu_worker_pool.ledger.faults import as_journal_error, describe, is_environmental, journal_errors
from gpu_worker_pool.ledger.journal import History, JournalDamaged, JournalError
from gpu_worker_pool.ledger.rows import Row, checked_crc, ended_row, event_rows
from gpu_worker_pool.ledger.sql_files import Migration, load_queries
from gpu_worker_pool.ledger.state_dir import check_files, make_state_dir

from . import quarantine
from .high_water_mark import HighWaterMark
from .lock import FileLock, JournalLock
from .migrations import back_up, create_private, known_migrations, migrate, version_of

Durability = Literal["full", "normal"]

# Enough for years of accounting; bounds the growth.
MOST_ENDED = 1_000_000
# The file is kept to about this size by forgetting the oldest ended leases.
MOST_BYTES = 1024 * 1024 * 1024

# The files of a journal, by what follows its name.
FILES = ("", ".lock", ".mark", "-wal", "-shm")

# For a program that locks the file for a moment. Short, because clients wait meanwhile.
BUSY_TIMEOUT_S = 1.0
# Rows in one statement. SQLite takes at least 999 values.
ROWS_AT_ONCE = 32


class SqliteJournal:
    """At "full" durability, writes survive a power cut; at "normal", a crash of the process.

    Opening it raises JournalInUse, JournalDamaged (the damaged file has been quarantined then) or JournalError.
    """

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability = "full",
        most_ended: int = MOST_ENDED,
        most_bytes: int = MOST_BYTES,
        migrations: Sequence[Migration] | None = None,
    ) -> None:
        self._path = path.absolute()
        self._durability = durability
        self._most_ended = most_ended
        self._most_bytes = most_bytes
        self._migrations = known_migrations() if migrations is None else migrations
        self._sql = load_queries(__package__)
        self._connection: sqlite3.Connection | None = None
        self.pool_id = ""
        self._inode = 0
        self._crc = 0
        self._position = 0
        self._since_compaction = 0
        self._bytes_since_compaction = 0
        self._high_water_mark = HighWaterMark(self._path, is_durable=durability == "full")
        self._name = str(self._path)
        self._log_name = f"{self._path}-wal"
        # The log's inode and size after the last write; None before the first.
        self._log: tuple[int, int] | None = None
        self._file_lock: FileLock | None = None
        with journal_errors(self._path):
            make_state_dir(self._path.parent)
            check_files(*(Path(f"{self._path}{end}") for end in FILES))
            self._lock: JournalLock | None = JournalLock(self._path)
        try:
            with journal_errors(self._path):
                if not self._path.exists():
                    self._create_unless_damaged()
                self._open()
        except BaseException:
            self.close()
            raise

    def load(self, most_ended: int) -> History:
        """Return all events and at most this many ended leases; a damaged file is quarantined."""
        with journal_errors(self._path):
            connection = self._writable()
            with self._quarantine_if_damaged():
                events = tuple(map(decode_event, self._read_bodies(connection)))
                return History(events, tuple(self._read_ended(connection, most_ended)))

    def append(self, events: Sequence[DurableEvent], ended: Sequence[EndedLease]) -> None:
        rows, crc = event_rows(events, self._crc)
        ended_rows = [ended_row(lease) for lease in ended]
        if not rows and not ended_rows:
            return
        reach("before_append")

        def change(connection: sqlite3.Connection) -> None:
            insert(connection, self._sql["append_event"], numbered(rows, self._position))
            insert(connection, self._sql["keep_ended"], ended_rows)
            reach("in_append")

        self._transact(change)
        self._crc = crc
        self._since_compaction += len(rows)
        self._bytes_since_compaction += sum(len(str(row[2])) for row in rows)
        self._note_written(len(rows))
        reach("after_append")

    def compact(self, events: Sequence[DurableEvent]) -> None:
        rows, crc = event_rows(events, 0)

        def change(connection: sqlite3.Connection) -> None:
            self._rewrite(connection, rows)
            most = self._most_ended_within_bounds(connection)
            connection.execute(self._sql["note_pruned"], (most,))
            connection.execute(self._sql["prune_ended"], (most,))

        self._transact(change)
        self._crc = crc
        self._since_compaction = self._bytes_since_compaction = 0
        self._note_written(len(rows))
        reach("after_compaction")
        self._fold_log()

    def replace_damaged(self, events: Sequence[DurableEvent]) -> None:
        """Quarantine the damaged file and start a new one with these events; the ended leases stay in the damaged file."""
        self._must_not_be_closed()
        with journal_errors(self._path):
            new = self._build(events, lost_at=time())
            self._quarantine()
            self._put_in_place(new)
            self._open()

    @property
    def events_since_compaction(self) -> int:
        return self._since_compaction

    @property
    def bytes_since_compaction(self) -> int:
        return self._bytes_since_compaction

    def close(self) -> None:
        self._disconnect()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __repr__(self) -> str:
        state = "closed" if self._lock is None else f"{self._since_compaction} events since the last compaction"
        return f"<SqliteJournal {self._path}: {self._durability}, {state}>"

    def _transact(self, change: Callable[[sqlite3.Connection], None]) -> None:
        """Make a change, all of it or nothing. No context managers: this runs for every lease."""
        try:
            connection = self._writable()
            connection.execute("BEGIN IMMEDIATE")
            try:
                change(connection)
                connection.execute("COMMIT")
            finally:
                # After a failure SQLite may have rolled back by itself.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except (sqlite3.Error, OSError) as error:
            raise as_journal_error(error, self._path) from error

    def _note_written(self, count: int) -> None:
        """Record the position and the log's identity; both are checked before the next use."""
        self._position += count
        self._log = _identity(self._log_name)
        with suppress(OSError):
            # If the disk is full the mark stays behind, which is harmless.
            self._high_water_mark.write(self._position)

    def _writable(self) -> sqlite3.Connection:
        """The connection, if its file is still in place: SQLite would go on writing to a deleted file."""
        self._must_not_be_closed()
        try:
            inode = os.stat(self._name).st_ino  # noqa: PTH116 - see _identity
        except FileNotFoundError:
            inode = None
        if inode != self._inode:
            raise JournalDamaged(f"the journal {self._path} was deleted, moved or replaced while it was in use")
        if self._log is not None:
            found = _identity(self._log_name)
            if found is None or found[0] != self._log[0] or found[1] < self._log[1]:
                raise JournalDamaged(
                    f"the log of the journal, {self._log_name}, was deleted or cut while it was in use"
                )
        if self._connection is None:
            self._open()
        assert self._connection is not None  # noqa: S101 - _open has set it
        return self._connection

    def _must_not_be_closed(self) -> None:
        if self._lock is None:
            raise JournalError(f"the journal {self._path} is closed; open it again to go on")

    def _rewrite(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
        rows, half = numbered(rows, self._position), len(rows) // 2
        connection.execute(self._sql["delete_events"])
        connection.executemany(self._sql["append_event"], rows[:half])
        reach("in_compaction")
        connection.executemany(self._sql["append_event"], rows[half:])
        connection.execute(self._sql["note_compaction"], (self._position + len(rows),))

    def _most_ended_within_bounds(self, connection: sqlite3.Connection) -> int:
        """How many ended leases to keep: in a file that is too large, a quarter fewer than there are."""
        (used,) = connection.execute(self._sql["used_bytes"]).fetchone()
        if used <= self._most_bytes:
            return self._most_ended
        (span,) = connection.execute(self._sql["span_of_ended"]).fetchone()
        return min(self._most_ended, int(span) * 3 // 4)

    def _fold_log(self) -> None:
        """Fold the log into the file, unless a reader prevents it now; then a later compaction does."""
        connection = self._writable()
        with suppress(sqlite3.Error):
            connection.execute("PRAGMA busy_timeout = 0")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._log = _identity(self._log_name)
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")

    def _read_bodies(self, connection: sqlite3.Connection) -> Iterator[str]:
        crc = 0
        for body, noted_crc in connection.execute(self._sql["read_events"]):
            crc = checked_crc(body, noted_crc, crc)
            yield body

    def _read_ended(self, connection: sqlite3.Connection, most: int) -> Iterator[EndedLease]:
        for body, noted_crc in connection.execute(self._sql["read_last_ended"], (most,)):
            checked_crc(body, noted_crc, 0)
            yield decode_ended(body)

    def _create_unless_damaged(self) -> None:
        """Create the journal at the first start; refuse after damage that no operator has dealt with yet."""
        # A log without its database would be taken for the new database's log, and ruin it.
        if Path(f"{self._path}-wal").exists():
            quarantine.isolate(self._path)
        if found := quarantine.isolated(self._path):
            raise JournalDamaged(quarantine.advice(self._path, found))
        self._high_water_mark.remove()  # of a journal that was moved away
        self._put_in_place(self._build(()))

    def _build(self, events: Sequence[DurableEvent], *, lost_at: float | None = None) -> Path:
        """Build a complete journal under another name. `lost_at`: records of leases that ended before are lost."""
        rows, _ = event_rows(events, 0)
        new = Path(f"{self._path}.new")
        # Remains of a process that was killed while building.
        for suffix in ("", "-journal", "-wal", "-shm"):
            Path(f"{new}{suffix}").unlink(missing_ok=True)
        create_private(new)
        with closing(connect(new)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            migrate(connection, self._migrations)
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(self._sql["append_event"], numbered(rows, 0))
            connection.execute(self._sql["note_compaction"], (len(rows),))
            connection.execute(self._sql["note_lost"], (lost_at,))
            if self.pool_id:
                connection.execute(self._sql["keep_pool_id"], (self.pool_id,))
            connection.execute("COMMIT")
        return new

    def _put_in_place(self, new: Path) -> None:
        new.rename(self._path)
        quarantine.sync_folder(self._path.parent)

    def _open(self) -> None:
        if self._file_lock is None:
            self._file_lock = FileLock(self._path)
        with self._quarantine_if_damaged():
            connection = self._connection = connect(self._path)
            self._inode = self._path.stat().st_ino
            self._check_version(version_of(connection))
            findings = [finding for (finding,) in connection.execute("PRAGMA quick_check(3)")]
            if findings != ["ok"]:
                raise ValueError("; ".join(map(str, findings)))
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {self._durability}")
            # On macOS a plain fsync does not reach the disk.
            connection.execute(f"PRAGMA fullfsync = {int(self._durability == 'full')}")
        if version_of(connection) < self._migrations[-1].version:
            with self._quarantine_if_damaged():
                # A migration would give what was altered a new checksum.
                for _ in self._read_bodies(connection):
                    pass
            back_up(connection, self._path)
            migrate(connection, self._migrations)
        with self._quarantine_if_damaged():
            last = connection.execute(self._sql["last_crc"]).fetchone()
            self._crc = last[0] if last else 0
            (self._since_compaction,) = connection.execute(self._sql["count_since_compaction"]).fetchone()
            (self._bytes_since_compaction,) = connection.execute(self._sql["bytes_since_compaction"]).fetchone()
            (self._position,) = connection.execute(self._sql["last_position"]).fetchone()
            (self.pool_id,) = connection.execute(self._sql["read_pool_id"]).fetchone()
            missing = self._high_water_mark.missing_after(self._position)
            if missing:
                raise ValueError(f"its last {missing} events, which were written, are missing")
        self._log = None
        with suppress(OSError):
            self._high_water_mark.write(self._position)

    def _check_version(self, version: int) -> None:
        known = self._migrations[-1].version
        if version > known:
            raise JournalError(
                f"the journal {self._path} was written by a newer version of this program (its tables are of version "
                f"{version}, this one knows {known}): install the newer one again, or give this server another "
                "GPU_POOL_STATE_DIR"
            )
        if version == 0:
            raise ValueError("it has no tables")

    @contextmanager
    def _quarantine_if_damaged(self) -> Iterator[None]:
        """While a file is opened or read: quarantine it if it is damaged, so that the next start notices."""
        try:
            yield
        except (sqlite3.Error, ValueError) as error:
            if isinstance(error, sqlite3.Error) and is_environmental(error):
                raise JournalError(describe(error, self._path)) from error
            self._quarantine()
            self.close()
            found = quarantine.isolated(self._path)
            raise JournalDamaged(
                f"the journal {self._path} is damaged ({error}). {quarantine.advice(self._path, found)}"
            ) from error

    def _quarantine(self) -> None:
        # Renamed before it is closed: on closing, SQLite folds the log into the file, unless the file was moved. Closed
        # before there is a new one: closing also deletes the log, by its name.
        quarantine.isolate(self._path)
        self._disconnect()
        self._high_water_mark.remove()
        Path(f"{self._path}-shm").unlink(missing_ok=True)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._high_water_mark.close()
        if self._file_lock is not None:
            self._file_lock.release()
            self._file_lock = None


def _identity(name: str) -> tuple[int, int] | None:
    # Not by Path, which takes as long again: this runs three times for every lease.
    try:
        found = os.stat(name)  # noqa: PTH116
    except OSError:
        return None
    return found.st_ino, found.st_size


def numbered(rows: Sequence[Row], last: int) -> list[Row]:
    """The rows of events with their positions, which follow the last one."""
    return [(position, *row) for position, row in enumerate(rows, last + 1)]


def insert(connection: sqlite3.Connection, sql: str, rows: Sequence[Row]) -> None:
    """Insert rows by a query for one row, in few statements: before and after each, this thread waits for the event loop's."""
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        connection.execute(_for_rows(sql, len(some)), [value for row in some for value in row])


@lru_cache(maxsize=2 * ROWS_AT_ONCE)
def _for_rows(sql: str, number: int) -> str:
    before, _, row = sql.rstrip(";").rpartition("VALUES ")
    return f"{before}VALUES {', '.join([row] * number)}"


def connect(path: Path) -> sqlite3.Connection:
    # mode=rw: SQLite must not create a file. Loading and writing happen in two threads, one after the other.
    return sqlite3.connect(
        f"{path.as_uri()}?mode=rw", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
