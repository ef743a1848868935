"""The high-water mark: how far a journal was written, kept beside it, to notice a missing end.

SQLite takes a damaged part of its log for the end of the log, and silently forgets what came after. The mark is written
after each commit and not synced: it survives the death of the process, which is when it is needed, and costs almost
nothing. After a power cut it may be older than the journal, which is harmless, or at "normal" durability newer, which
is not damage. So it only counts on the boot it was written on, or at full durability.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from zlib import crc32

from gpu_worker_pool.host.clock import boot_id

_FORM = struct.Struct("<Q?40sI")


class HighWaterMark:
    def __init__(self, path: Path, *, is_durable: bool) -> None:
        self._path = Path(f"{path}.mark")
        self._is_durable = is_durable
        self._boot = boot_id().encode()[:40].ljust(40, b"\0")
        self._descriptor: int | None = None

    def missing_after(self, position: int) -> int:
        """The number of events that were written after `position`, the last one found."""
        try:
            noted, was_durable, boot, crc = _FORM.unpack(self._read())
        except (OSError, struct.error):
            return 0  # no mark, or an unreadable one
        if crc != _crc(noted, was_durable, boot) or not (was_durable or boot == self._boot):
            return 0
        return max(int(noted) - position, 0)

    def _read(self) -> bytes:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.read(descriptor, _FORM.size)
        finally:
            os.close(descriptor)

    def write(self, position: int) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        crc = _crc(position, self._is_durable, self._boot)
        os.pwrite(self._descriptor, _FORM.pack(position, self._is_durable, self._boot, crc), 0)

    def remove(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _crc(position: int, is_durable: bool, boot: bytes) -> int:  # noqa: FBT001 - a field
    return crc32(f"{position}/{is_durable}".encode() + boot)
