"""What keeps a database to one process, and tells the next one how far it was written."""

from __future__ import annotations

import fcntl
import os
import re
import weakref
from pathlib import Path
from zlib import crc32

from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.ledger.journal import JournalInUse

# The length of the pid in a lock file, with blanks.
_SIGNATURE = 12
_CLOSED = -1


class FileLock:
    """Locks a file, until it is closed or the process ends. The kernel keeps the lock, so a leftover file locks no process
    out.

    On the database itself it holds under any name: a link to it is the same journal, and deleting the lock file does not
    unlock it. It must be closed after SQLite has closed the file, because closing any descriptor of a file drops SQLite's
    locks on it.
    """

    def __init__(self, path: Path, name: str, how: int = os.O_RDONLY) -> None:
        # O_CLOEXEC: otherwise a child program would keep the lock after this process has died.
        self._descriptor = os.open(path, how | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            signature = os.pread(self._descriptor, _SIGNATURE, 0).strip()
            self.close()
            if not isinstance(error, BlockingIOError):
                raise
            pid = int(signature) if signature.isdigit() else None
            holder = "another process" if pid is None else f"the process with pid {pid}"
            raise JournalInUse(f"{name} is in use by {holder}; use that server, or stop it first", pid) from None
        _locks.add(self)

    def close(self) -> None:
        if self._descriptor != _CLOSED:
            os.close(self._descriptor)
            self._descriptor = _CLOSED


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _unlock_in_child() -> None:
    # A fork shares the open file and its lock. Closing it here does not affect the parent.
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_unlock_in_child)


class LockFile(FileLock):
    """The lock file beside a database. It names the holder's pid, for people and for the error of a second process, and has
    the high-water mark: how far the database was written. The file stays: deleting it would take it from the next holder.

    SQLite takes a damaged part of its log for the end of the log, and silently forgets what came after. The mark tells. It is
    written after each commit and not synced: it survives the death of the process, which is when it is needed, and costs
    almost nothing. After a power cut it may be older than the database, which is harmless, or at "normal" durability newer,
    which is not damage. So the mark of a database that is not durable counts on the boot it was written on, and on no other:
    that is its `boot`. Without one it is durable.
    """

    def __init__(self, database: Path, *, boot: str = "") -> None:
        super().__init__(Path(f"{database}.lock"), str(database), os.O_RDWR | os.O_CREAT)
        self._boot = boot
        os.pwrite(self._descriptor, f"{os.getpid():<{_SIGNATURE}}".encode(), 0)

    def mark(self, position: int) -> None:
        os.pwrite(self._descriptor, _mark(position, self._boot).encode(), _SIGNATURE)


def holder_pid(database: Path) -> int | None:
    """The process that has locked a database, by the kernel's list: to take the lock would hinder a server that starts."""
    try:
        inode, locks = Path(f"{database}.lock").stat().st_ino, Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(rf"FLOCK +ADVISORY +WRITE +(\d+) +[0-9a-f]+:[0-9a-f]+:{inode} ", locks)
    return int(found[1]) if found else None


def read_mark(database: Path) -> int:
    """The last position that was written to a database; 0 if there is no mark that can be read and counts."""
    try:
        with Path(f"{database}.lock").open("rb") as file:
            noted = file.read(_SIGNATURE + 100)[_SIGNATURE:].decode("ascii")
        position, boot = int(noted[:20]), noted[20:60].strip()
    except (OSError, ValueError):
        return 0
    return position if noted.startswith(_mark(position, boot)) and boot in ("", boot_id()) else 0


def _mark(position: int, boot: str) -> str:
    text = f"{position:20}{boot:>40}"
    return f"{text}{crc32(text.encode()):11}\n"
