"""The lock that keeps a file to one process."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from gpu_worker_pool.ledger.journal import JournalInUse


class FileLock:
    """Locks a file, until the lock is released or the process ends. The kernel keeps the lock, so a leftover file locks no
    process out.

    A lock file beside the database (`is_signed`) names the holder's pid, for people and for the error of a second process.
    The lock on the database itself holds under any name: a link to it is the same journal, and deleting the lock file does
    not unlock it. That one must be released after SQLite has closed the file, because closing any descriptor of a file drops
    SQLite's locks on it.
    """

    def __init__(self, path: Path, *, is_signed: bool = False) -> None:
        how = os.O_RDWR | os.O_CREAT if is_signed else os.O_RDONLY
        # O_CLOEXEC: otherwise a child program would keep the lock after this process has died.
        self._descriptor: int | None = os.open(path, how | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._is_signed = is_signed
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _read_pid(self._descriptor) if is_signed else None
            self._close()
            holder = "another process" if pid is None else f"the process with pid {pid}"
            name = path.with_suffix("") if is_signed else f"{path}, under this or another name,"
            raise JournalInUse(f"{name} is in use by {holder}; use that server, or stop it first", pid) from None
        except BaseException:
            self._close()
            raise
        _held.add(self)
        if is_signed:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; again is harmless. The file stays: deleting it would take it from the next holder."""
        if self._descriptor is not None and self._is_signed:
            os.ftruncate(self._descriptor, 0)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _release_in_child() -> None:
    # A fork shares the open file and its lock. Closing it here does not affect the parent.
    for lock in list(_held):
        lock._close()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_release_in_child)


def _read_pid(descriptor: int) -> int | None:
    try:
        return int(os.pread(descriptor, 32, 0))
    except ValueError:
        return None
