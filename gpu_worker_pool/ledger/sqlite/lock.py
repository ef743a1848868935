"""Locks that keep a journal to one process."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from gpu_worker_pool.ledger.journal import JournalInUse


class JournalLock:
    """A lock file, held until it is released or the process ends. The kernel keeps the lock, so a leftover file locks
    no process out. The file names the holder's pid, for people and for the error of a second process.
    """

    def __init__(self, path: Path) -> None:
        # O_CLOEXEC: otherwise a child program would keep the lock after this process has died.
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _read_pid(descriptor)
            os.close(descriptor)
            holder = "another process" if pid is None else f"the process with pid {pid}"
            raise JournalInUse(f"{path} is in use by {holder}; use that server, or stop it first", pid) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        _held.add(self)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; again is harmless. The file stays: deleting it would take it from the next holder."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class FileLock:
    """A lock on the journal's own file, under any name: a link to it is the same journal, and deleting the lock file
    does not unlock it. It must be released after SQLite has closed the file, because closing any descriptor of a file
    drops SQLite's locks on it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise JournalInUse(
                f"{path} is in use by another process, under this or another name; use that server, or stop it first",
                None,
            ) from None
        _held.add(self)

    def release(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: weakref.WeakSet[JournalLock | FileLock] = weakref.WeakSet()


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
