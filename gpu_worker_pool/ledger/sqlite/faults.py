"""Faults of a SQLite file: which of them mean damage, and messages for all."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError

_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

# Faults of the file's environment. While a file is opened, any other fault is the file's own.
_ENVIRONMENT = {
    sqlite3.SQLITE_FULL: "the disk is full: free space in {folder}",
    sqlite3.SQLITE_IOERR: "the disk or its file system fails ({error}): check the system's log, and the limits and quotas on {folder}",
    sqlite3.SQLITE_READONLY: "it cannot be written ({error}): check the rights on {folder} and that its disk is not mounted read-only",
    sqlite3.SQLITE_PERM: "access is denied ({error}): check the rights on {folder}",
    sqlite3.SQLITE_AUTH: "access is denied ({error}): check the rights on {folder}",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened ({error}): check that {folder} is there and the rights on it",
    sqlite3.SQLITE_BUSY: "another program holds it locked ({error}): end what has it open, an sqlite3 shell or a backup",
    sqlite3.SQLITE_LOCKED: "another program holds it locked ({error}): end what has it open, an sqlite3 shell or a backup",
    sqlite3.SQLITE_PROTOCOL: "it cannot be locked ({error}): end what has it open, an sqlite3 shell or a backup",
    sqlite3.SQLITE_NOMEM: "there is not enough memory: free some on this machine",
    sqlite3.SQLITE_NOLFS: "its file system cannot hold a file that large: move {folder} to another one",
}


def is_environmental(error: sqlite3.Error) -> bool:
    """Whether the fault is in the file's environment, not in the file."""
    return _code(error) in _ENVIRONMENT


def as_journal_error(error: sqlite3.Error | OSError, path: Path, what: str = "journal") -> JournalError:
    """An error of SQLite or the system, as a journal promises it; `what` is said of the file."""
    if isinstance(error, sqlite3.Error):
        if _code(error) in _CORRUPT:
            return JournalDamaged(f"the {what} {path} is damaged: {error}")
        reason = _ENVIRONMENT.get(_code(error) or 0, "{error}")
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = _ENVIRONMENT[sqlite3.SQLITE_FULL]
    else:
        reason = "{error}: check {folder} and the rights on it"
    return JournalError(f"the {what} {path} cannot be used: {reason.format(error=error, folder=path.parent)}")


@contextmanager
def journal_errors(path: Path, what: str = "journal") -> Iterator[None]:
    """Turn errors of SQLite and the system into the errors that a journal promises."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise as_journal_error(error, path, what) from error


def _code(error: sqlite3.Error) -> int | None:
    # Without the extended part. Errors of the sqlite3 module itself (text that is not UTF-8) have no code.
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
