"""A SQLite file that one process writes: private, locked, complete when it has its name, and set aside if it is damaged."""

from __future__ import annotations

import errno
import glob
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.host.state_dir import check_files, create_private, make_state_dir, reach, sync_folder
from gpu_worker_pool.ledger.codec import NotUnderstood
from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError, JournalTooNew
from gpu_worker_pool.ledger.sql import VERSION

from .lock import FileLock, LockFile, read_mark

Durability = Literal["full", "normal"]
Change = Callable[[sqlite3.Connection], None]

# The files of a database, by what follows its name.
FILES = ("", ".lock", "-wal", "-shm")
# In the header of each file. Unreleased versions of this program wrote none.
APPLICATION_ID = int.from_bytes(b"gpup")
# The first with generated columns.
OLDEST_SQLITE = (3, 31)
# For a program that locks the file for a moment. Short, because clients wait meanwhile.
BUSY_TIMEOUT_S = 1.0

_DENIED = "access is denied ({error}): check the rights on {folder}"
_LOCKED = "another program holds it locked ({error}): end what has it open, an sqlite3 shell or a backup"
_FULL = "the disk is full: free space in {folder}"
# Faults of the file's environment. While a file is opened or read, any other fault is the file's own.
_ENVIRONMENT = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_IOERR: "the disk or its file system fails ({error}): check the system's log, and the limits and quotas on {folder}",
    sqlite3.SQLITE_READONLY: "it cannot be written ({error}): check the rights on {folder} and that its disk is not mounted read-only",
    sqlite3.SQLITE_PERM: _DENIED,
    sqlite3.SQLITE_AUTH: _DENIED,
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened ({error}): check that {folder} is there and the rights on it",
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_PROTOCOL: "it cannot be locked ({error}): end what has it open, an sqlite3 shell or a backup",
    sqlite3.SQLITE_NOMEM: "there is not enough memory: free some on this machine",
    sqlite3.SQLITE_NOLFS: "its file system cannot hold a file that large: move {folder} to another one",
}
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class SqliteFile:
    """At "full" durability, changes survive a power cut; at "normal", a crash of the process. All calls block.

    `position_query` tells the last position in the file: by this and the high-water mark a missing end is noticed. Making one
    of these takes the locks: JournalInUse if another process has the file, under any name. `what` is said of the file.
    """

    def __init__(
        self,
        path: Path,
        schema: str,
        *,
        durability: Durability = "full",
        position_query: str = "SELECT 0",
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
        self._log_path = f"{self.path}-wal"
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        # The log's inode and size after the last change; None before the first.
        self._log: tuple[int, int] | None = None
        self._own_lock: FileLock | None = None
        with self.errors():
            make_state_dir(self.path.parent)
            check_files(*(Path(f"{self.path}{end}") for end in FILES))
            self._lock: LockFile | None = LockFile(self.path, boot="" if durability == "full" else boot_id())
            try:
                self._lock_itself()
            except BaseException:
                self.close()
                raise

    @property
    def is_closed(self) -> bool:
        return self._lock is None

    def errors(self, *, is_read: bool = False) -> AbstractContextManager[None]:
        """Turn errors of SQLite and the system into those that a journal promises."""
        return journal_errors(self.path, self._what, is_read=is_read)

    def open(self) -> sqlite3.Connection:
        """Connect to the file that is in place. JournalDamaged, or JournalError if it is of another version."""
        with self.errors(is_read=True):
            self._lock_itself()
            connection = self._connection = connect(self.path)
            self._inode, self._log = self.path.stat().st_ino, None
            check_version(connection, self.path, self._what)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {self._durability}")
            # On macOS a plain fsync does not reach the disk.
            connection.execute(f"PRAGMA fullfsync = {int(self._durability == 'full')}")
            self.position = int(connection.execute(self._position_query).fetchone()[0])
            if (missing := read_mark(self.path) - self.position) > 0:
                raise ValueError(f"its last {missing} events, which were written, are missing")
            self._mark(self.position)
        return connection

    def connection(self) -> sqlite3.Connection:
        """The connection, if its file is still in place: SQLite would go on writing to a deleted file."""
        if self._lock is None:
            raise JournalError(f"the {self._what} {self.path} is closed; open it again to go on")
        found = _identity(self.path)
        if found is None or found[0] != self._inode or self._connection is None:
            raise JournalDamaged(f"the {self._what} {self.path} was deleted, moved or replaced while it was in use")
        if self._log is not None:
            log, (inode, size) = _identity(self._log_path), self._log
            is_whole = log is not None and log[0] == inode and log[1] >= size
            if not is_whole and (log != (inode, 0) or not self._has_folded_log()):
                raise JournalDamaged(
                    f"the log of the {self._what}, {self._log_path}, was deleted or cut while it was in use"
                )
            self._log = log
        return self._connection

    @contextmanager
    def transaction(self, added: int = 0) -> Iterator[sqlite3.Connection]:
        """Make changes, all of them or none, which add this many events."""
        with self.errors():
            connection = self.connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                # After a failure SQLite may have rolled back by itself.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        self._log = _identity(self._log_path)
        self.position += added
        self._mark(self.position)

    def replace(self, fill: Change) -> Path | None:
        """Make the file with its tables, and with what `fill` writes. If there is one, set it aside; return where it is."""
        new = self._build(fill)
        aside = self.set_aside()
        # While a file is set aside, a server makes no new journal: a process that is killed here leaves no way to grant
        # anything.
        reach("in_replacement")
        new.rename(self.path)
        sync_folder(self.path.parent)
        return aside

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

    def set_aside(self) -> Path | None:
        """Disconnect, and rename the file, so that it is kept. Return its new name."""
        # Renamed before it is closed: on closing, SQLite folds the log into the file, unless the file was moved. Closed
        # before there is a new one: closing also deletes the log, by its name.
        aside = isolate(self.path)
        self._disconnect()
        self._mark(0)
        Path(f"{self.path}-shm").unlink(missing_ok=True)
        return aside

    def close(self) -> None:
        self._disconnect()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _lock_itself(self) -> None:
        if self._own_lock is None and self.path.exists():
            self._own_lock = FileLock(self.path, f"{self.path}, under this or another name,")

    def _has_folded_log(self) -> bool:
        """Whether another program has folded the log into the file: the last position is in the file itself."""
        with suppress(sqlite3.Error), closing(connect(self.path, "ro&immutable=1")) as connection:
            return bool(connection.execute(self._position_query).fetchone()[0] == self.position)
        return False

    def _mark(self, position: int) -> None:
        if self._lock is not None:
            with suppress(OSError):  # if the disk is full the mark stays behind, which is harmless
                self._lock.mark(position)

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        # After SQLite has closed the file: see FileLock.
        if self._own_lock is not None:
            self._own_lock.close()
            self._own_lock = None


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
    """NotUnderstood or JournalError if another version of this program made the file; a ValueError if it has no tables."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application == APPLICATION_ID and version > VERSION:
        raise NotUnderstood(f"its tables are of version {version}, this one knows {VERSION}")
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
    # Opening the file leaves an empty log, which need not be kept.
    if log.exists() and not log.stat().st_size:
        log.unlink()
    found = [(file, name) for file, name in ((path, aside), (log, f"{aside}-wal")) if file.exists()]
    for file, name in found:
        file.rename(name)
    sync_folder(path.parent)
    return Path(aside) if found else None


def isolated(path: Path) -> list[Path]:
    """Files that were set aside and not yet moved away, oldest first."""
    return sorted(path.parent.glob(f"{glob.escape(path.name)}.damaged-*"))


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a Path takes twice as long, and this runs for every lease
    except OSError:
        return None
    return found.st_ino, found.st_size


@contextmanager
def journal_errors(path: Path, what: str = "journal", *, is_read: bool = False) -> Iterator[None]:
    """Turn errors of SQLite and the system into those that a journal promises. `what` is said of the file. While it is opened
    or read, what is wrong with it, and not with its environment, is damage. A whole file that is not understood is too new.
    """
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        # Without the extended part. Errors of the sqlite3 module itself (text that is not UTF-8) have no code.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if isinstance(error, OSError):
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = _FULL if is_full else "{error}: check {folder} and the rights on it"
        elif code in _CORRUPT or (is_read and code not in _ENVIRONMENT):
            raise JournalDamaged(f"the {what} {path} is damaged ({error})") from error
        else:
            reason = _ENVIRONMENT.get(code, "{error}")
        reason = reason.format(error=error, folder=path.parent)
        raise JournalError(f"the {what} {path} cannot be used: {reason}") from error
    except NotUnderstood as error:
        raise JournalTooNew(
            f"the {what} {path} was written by a newer version of this program ({error}): install the newer one again, or "
            "give this server another GPU_POOL_STATE_DIR"
        ) from error
    except (ValueError, TypeError) as error:  # TypeError: a row that must be there is not
        if not is_read:
            raise
        raise JournalDamaged(f"the {what} {path} is damaged ({error})") from error
