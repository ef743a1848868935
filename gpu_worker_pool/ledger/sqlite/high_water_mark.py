"""How far a journal was written, kept beside it, so that it is noticed when its end is missing.

SQLite takes a damaged part of its log for the end of it, and so forgets without a word what came after. The mark is
written after each commit and not synced: it outlives the death of the process, which is when it is needed, and costs
next to nothing. After a power cut it may be older than the journal, which does no harm, and at "normal" durability newer,
which is no damage: so it only counts on the boot it was written on, or at full durability.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from zlib import crc32

from gpu_worker_pool.host.clock import boot_id

_FORM = struct.Struct("<Q?40sI")


class HighWaterMark:
    """The last position that was written, in a small file."""

    def __init__(self, path: Path, *, is_durable: bool) -> None:
        self._path = Path(f"{path}.mark")
        self._is_durable = is_durable
        self._boot = boot_id().encode()[:40].ljust(40, b"\0")
        self._descriptor: int | None = None

    def missing_after(self, position: int) -> int:
        """How many events were written after this one, which is the last there is."""
        try:
            noted, was_durable, boot, crc = _FORM.unpack(self._path.read_bytes()[: _FORM.size])
        except (OSError, struct.error):
            return 0  # there never was one, or it tells nothing
        if crc != _crc(noted, was_durable, boot) or not (was_durable or boot == self._boot):
            return 0
        return max(int(noted) - position, 0)

    def write(self, position: int) -> None:
        """All up to this one are written."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        crc = _crc(position, self._is_durable, self._boot)
        os.pwrite(self._descriptor, _FORM.pack(position, self._is_durable, self._boot, crc), 0)

    def remove(self) -> None:
        """What it is about is no longer there."""
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _crc(position: int, is_durable: bool, boot: bytes) -> int:  # noqa: FBT001 - a field
    return crc32(f"{position}/{is_durable}".encode() + boot)
