"""Faults of a SQLite file: which of them mean damage, and messages for all."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_worker_pool.ledger.codec import NotUnderstood
from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError, JournalTooNew

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
