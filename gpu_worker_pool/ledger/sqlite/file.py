"""A SQLite file that one process writes: private, locked, complete when it has its name, and set aside if it is damaged."""

from __future__ import annotations

import glob
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from gpu_worker_pool.host.failpoints import reach
from gpu_worker_pool.host.state_dir import check_files, create_private, make_state_dir, sync_folder
from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError, JournalTooNew
from gpu_worker_pool.ledger.sql_rows import VERSION

from .faults import as_journal_error, is_environmental, journal_errors
from .high_water_mark import HighWaterMark
from .lock import FileLock

Durability = Literal["full", "normal"]
Change = Callable[[sqlite3.Connection], None]

# The files of a database, by what follows its name.
FILES = ("", ".lock", ".mark", "-wal", "-shm")
# In the header of each file. Unreleased versions of this program wrote none.
APPLICATION_ID = int.from_bytes(b"gpup")
# The first with generated columns.
OLDEST_SQLITE = (3, 31)
# For a program that locks the file for a moment. Short, because clients wait meanwhile.
BUSY_TIMEOUT_S = 1.0


class SqliteFile:
    """At "full" durability, changes survive a power cut; at "normal", a crash of the process. All calls block.

    With `position_query`, which tells the last position in the file, the high-water mark notices that the end of the log is
    missing. Making one of these takes the lock: JournalInUse if another process has it. `what` is said of the file.
    """

    def __init__(
        self,
        path: Path,
        schema: str,
        *,
        durability: Durability = "full",
        position_query: str | None = None,
        what: str = "journal",
    ) -> None:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            needed = ".".join(map(str, OLDEST_SQLITE))
            raise JournalError(
                f"SQLite is {sqlite3.sqlite_version}, and the {what} needs {needed} or newer: use another Python, such as "
                "one of uv or conda, which brings its own"
            )
        self.path = path.absolute()
        self.position = 0
        self._schema = schema
        self._durability = durability
        self._position_query = position_query
        self._what = what
        self._name, self._log_name = str(self.path), f"{self.path}-wal"
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        # The log's inode and size after the last change; None before the first.
        self._log: tuple[int, int] | None = None
        self._mark = HighWaterMark(self.path, is_durable=durability == "full")
        self._file_lock: FileLock | None = None
        with self.errors():
            make_state_dir(self.path.parent)
            check_files(*(Path(f"{self.path}{end}") for end in FILES))
            self._lock: FileLock | None = FileLock(Path(f"{self.path}.lock"), is_signed=True)

    @property
    def is_closed(self) -> bool:
        return self._lock is None

    def errors(self) -> AbstractContextManager[None]:
        """Turn errors of SQLite and the system into those that a journal promises."""
        return journal_errors(self.path, self._what)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While the file is opened or read: what is wrong with it, and not with its environment, is damage."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError) as error:  # TypeError: a row that must be there is not
            if isinstance(error, sqlite3.Error) and is_environmental(error):
                raise as_journal_error(error, self.path, self._what) from error
            raise JournalDamaged(f"the {self._what} {self.path} is damaged ({error})") from error

    def hold(self) -> None:
        """Lock the database itself, if it is there. JournalInUse if another process has it under another name."""
        if self._file_lock is None and self.path.exists():
            self._file_lock = FileLock(self.path)

    def open(self) -> sqlite3.Connection:
        """Connect to the file that is in place. JournalDamaged, or JournalError if it is of another version."""
        self.hold()
        with self.reading():
            connection = self._connection = connect(self.path)
            self._inode = self.path.stat().st_ino
            check_version(connection, self.path, self._what)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {self._durability}")
            # On macOS a plain fsync does not reach the disk.
            connection.execute(f"PRAGMA fullfsync = {int(self._durability == 'full')}")
            self._log = None
            if self._position_query is not None:
                self.position = int(connection.execute(self._position_query).fetchone()[0])
                if missing := self._mark.missing_after(self.position):
                    raise ValueError(f"its last {missing} events, which were written, are missing")
                self._write_mark()
        return connection

    def connection(self) -> sqlite3.Connection:
        """The connection, if its file is still in place: SQLite would go on writing to a deleted file."""
        if self._lock is None:
            raise JournalError(f"the {self._what} {self.path} is closed; open it again to go on")
        found = _identity(self._name)
        if found is None or found[0] != self._inode or self._connection is None:
            raise JournalDamaged(f"the {self._what} {self.path} was deleted, moved or replaced while it was in use")
        if self._log is not None:
            log = _identity(self._log_name)
            is_whole = log is not None and log[0] == self._log[0] and log[1] >= self._log[1]
            if not is_whole and (log != (self._log[0], 0) or self._position_in_file() != self.position):
                raise JournalDamaged(
                    f"the log of the {self._what}, {self._log_name}, was deleted or cut while it was in use"
                )
            self._log = log
        return self._connection

    def transact(self, change: Change, position: int | None = None) -> None:
        """Make a change, all of it or nothing, and note the last position. No context managers: this runs for every lease."""
        try:
            connection = self.connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                change(connection)
                connection.execute("COMMIT")
            finally:
                # After a failure SQLite may have rolled back by itself.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except (sqlite3.Error, OSError) as error:
            raise as_journal_error(error, self.path, self._what) from error
        if self._position_query is not None:
            self._log = _identity(self._log_name)
            if position is not None:
                self.position = position
                self._write_mark()

    def fold_log(self) -> None:
        """Fold the log into the file, unless a reader or a fault prevents it now; then a later call does."""
        with suppress(sqlite3.Error, OSError, JournalError):
            connection = self.connection()
            connection.execute("PRAGMA busy_timeout = 0")
            try:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")
            if self._log is not None:
                self._log = _identity(self._log_name)

    def create(self, fill: Change) -> None:
        """Make the file with its tables, and with what `fill` writes."""
        self._mark.remove()  # of a file that was moved away
        self.put_in_place(self._build(fill))

    def replace(self, fill: Change) -> Path | None:
        """Set the file aside, and put a new one in its place; return where the old one is."""
        new = self._build(fill)
        aside = self.set_aside()
        self.put_in_place(new)
        return aside

    def set_aside(self) -> Path | None:
        """Disconnect, and rename the file, so that it is kept. Return its new name."""
        # Renamed before it is closed: on closing, SQLite folds the log into the file, unless the file was moved. Closed
        # before there is a new one: closing also deletes the log, by its name.
        aside = isolate(self.path)
        self._disconnect()
        self._mark.remove()
        Path(f"{self.path}-shm").unlink(missing_ok=True)
        return aside

    def close(self) -> None:
        self._disconnect()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _build(self, fill: Change) -> Path:
        """Build the file under another name: a file at the final path is complete."""
        new = Path(f"{self.path}.new")
        # Remains of a process that was killed while building.
        for suffix in ("", "-journal", "-wal", "-shm"):
            Path(f"{new}{suffix}").unlink(missing_ok=True)
        create_private(new)
        with closing(connect(new)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.executescript(f"BEGIN;\n{self._schema}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
            fill(connection)
            reach("in_creation")
            connection.execute("COMMIT")
        reach("after_creation")
        return new

    def put_in_place(self, new: Path) -> None:
        """Give a complete file its name."""
        new.rename(self.path)
        sync_folder(self.path.parent)

    def _position_in_file(self) -> int | None:
        """The last position in the file itself, without its log. Another program may have folded the log into the file."""
        if self._position_query is None:
            return None
        with suppress(sqlite3.Error), closing(connect(self.path, "ro&immutable=1")) as connection:
            (position,) = connection.execute(self._position_query).fetchone()
            return int(position)
        return None

    def _write_mark(self) -> None:
        with suppress(OSError):
            # If the disk is full the mark stays behind, which is harmless.
            self._mark.write(self.position)

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        self._mark.close()
        # After SQLite has closed the file: see FileLock.
        if self._file_lock is not None:
            self._file_lock.release()
            self._file_lock = None


def connect(path: Path, mode: str = "rw", timeout_s: float = BUSY_TIMEOUT_S) -> sqlite3.Connection:
    """Open a file, in no mode that creates one. Opening, loading and writing happen in threads, one after the other. With
    the mode "ro", closing does not fold the writer's log into the file.
    """
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )
    # A client may send half of a surrogate pair, which is not UTF-8.
    connection.text_factory = lambda text: text.decode("utf-8", "backslashreplace")
    return connection


def check_version(connection: sqlite3.Connection, path: Path, what: str) -> None:
    """JournalTooNew or JournalError if another version of this program made the file; a ValueError if it has no tables."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application == APPLICATION_ID and version > VERSION:
        raise JournalTooNew(
            f"the {what} {path} was made by a newer version of this program (its tables are of version {version}, this one "
            f"knows {VERSION}): install the newer one again, or give this server another GPU_POOL_STATE_DIR"
        )
    if application != APPLICATION_ID and (application or version):
        raise JournalError(
            f"the {what} {path} was made by an unreleased version of this program (its tables are of version {version}), and "
            "this one cannot read it. It is left as it is: let its leases end under that version, then move the file away "
            "and restart, or give this server another GPU_POOL_STATE_DIR"
        )
    if version != VERSION:
        raise ValueError("it has no tables")


def isolate(path: Path) -> Path | None:
    """Rename a database and its log; return the new name, None if neither existed.

    SQLite finds a log by its name, so the two stay together. The database goes first: without its log it would look
    like a sound one with fewer events.
    """
    aside = first = f"{path}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    number = 1
    while os.path.lexists(aside) or os.path.lexists(f"{aside}-wal"):
        number += 1
        aside = f"{first}-{number}"
    log = Path(f"{path}-wal")
    is_there = path.exists()
    if is_there:
        path.rename(aside)
    if log.exists():
        # Opening the file leaves an empty one, which need not be kept.
        if log.stat().st_size:
            log.rename(f"{aside}-wal")
            is_there = True
        else:
            log.unlink()
    sync_folder(path.parent)
    return Path(aside) if is_there else None


def isolated(path: Path) -> list[Path]:
    """Files that were set aside and not yet moved away, oldest first."""
    return sorted(path.parent.glob(f"{glob.escape(path.name)}.damaged-*"))


def _identity(name: str) -> tuple[int, int] | None:
    # Not by Path, which takes as long again: this runs three times for every lease.
    try:
        found = os.stat(name)  # noqa: PTH116
    except OSError:
        return None
    return found.st_ino, found.st_size
