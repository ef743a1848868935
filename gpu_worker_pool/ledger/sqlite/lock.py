"""The lock that keeps a journal to one process."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from gpu_worker_pool.ledger.journal import JournalInUse


class JournalLock:
    """Held until it is released or the process is gone, however it went: the kernel keeps it, so that a file which was
    left behind locks nobody out. The file names the holder's pid, for people and for the error of whoever comes second.
    """

    def __init__(self, path: Path) -> None:
        # With O_CLOEXEC, or a program started from here would go on holding the lock after our death.
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _read_pid(descriptor)
            os.close(descriptor)
            holder = "another process" if pid is None else f"the process with pid {pid}"
            raise JournalInUse(
                f"{path} is in use by {holder}; stop it, or give this server another GPU_POOL_STATE_DIR", pid
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        _held.add(self)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next one in; again is harmless. The file stays: to delete it would take it from under the next one."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class FileLock:
    """A lock on the journal's own file, whatever name it was opened by: a link to it is the same journal, and a lock file
    that somebody deleted locks nobody out. It must be let go only after SQLite has closed the file, because closing any
    descriptor of a file drops what SQLite has locked in it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise JournalInUse(
                f"{path} is in use by another process, under this or another name; stop it, or give this server another "
                "GPU_POOL_STATE_DIR",
                None,
            ) from None
        _held.add(self)

    def release(self) -> None:
        """Let go; again is harmless."""
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: weakref.WeakSet[JournalLock | FileLock] = weakref.WeakSet()


def _release_in_child() -> None:
    # A fork has the same open file and with it the lock. Closing it here leaves the parent's as it is.
    for lock in list(_held):
        lock._close()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_release_in_child)


def _read_pid(descriptor: int) -> int | None:
    try:
        return int(os.pread(descriptor, 32, 0))
    except ValueError:
        return None
