"""Two small files beside a database: the lock that keeps it to one process, and the high-water mark."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from zlib import crc32

from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.ledger.journal import JournalInUse


class FileLock:
    """Locks a file, until it is closed or the process ends. The kernel keeps the lock, so a leftover file locks no process
    out, and the file stays: deleting it would take it from the next holder.

    A lock file beside the database (`is_signed`) names the holder's pid, for people and for the error of a second process.
    The lock on the database itself holds under any name: a link to it is the same journal, and deleting the lock file does
    not unlock it. That one must be closed after SQLite has closed the file, because closing any descriptor of a file drops
    SQLite's locks on it.
    """

    def __init__(self, path: Path, *, is_signed: bool = False) -> None:
        how = os.O_RDWR | os.O_CREAT if is_signed else os.O_RDONLY
        # O_CLOEXEC: otherwise a child program would keep the lock after this process has died.
        self._descriptor: int | None = os.open(path, how | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = _read_pid(self._descriptor) if is_signed else None
            self.close()
            if not isinstance(error, BlockingIOError):
                raise
            holder = "another process" if pid is None else f"the process with pid {pid}"
            name = path.with_suffix("") if is_signed else f"{path}, under this or another name,"
            raise JournalInUse(f"{name} is in use by {holder}; use that server, or stop it first", pid) from None
        _locks.add(self)
        if is_signed:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _unlock_in_child() -> None:
    # A fork shares the open file and its lock. Closing it here does not affect the parent.
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_unlock_in_child)


def _read_pid(descriptor: int) -> int | None:
    try:
        return int(os.pread(descriptor, 32, 0))
    except ValueError:
        return None


class HighWaterMark:
    """How far a journal was written, to notice a missing end.

    SQLite takes a damaged part of its log for the end of the log, and silently forgets what came after. The mark is written
    after each commit and not synced: it survives the death of the process, which is when it is needed, and costs almost
    nothing. After a power cut it may be older than the journal, which is harmless, or at "normal" durability newer, which is
    not damage. So the mark of a journal that is not durable counts on the boot it was written on, and on no other.
    """

    def __init__(self, path: Path, *, is_durable: bool) -> None:
        self._path = Path(f"{path}.mark")
        self._boot = "" if is_durable else boot_id()
        self._descriptor: int | None = None

    def read(self) -> int:
        """The last position that was written; 0 if there is no mark that can be read and counts."""
        try:
            with self._path.open("rb") as file:
                noted = file.read(100)
            position, boot = int(noted[:20]), noted[20:60].decode("ascii").strip()
        except (OSError, ValueError):
            return 0
        return position if noted == _mark(position, boot) and boot in ("", boot_id()) else 0

    def write(self, position: int) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.pwrite(self._descriptor, _mark(position, self._boot), 0)

    def remove(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _mark(position: int, boot: str) -> bytes:
    text = f"{position:20}{boot:>40}".encode()
    return text + f"{crc32(text):11}\n".encode()
