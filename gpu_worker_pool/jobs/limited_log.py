"""A log of limited size for the output of a command."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

_READ_BYTES: Final = 65536


@asynccontextmanager
async def limited_log(path: Path, limit_bytes: int) -> AsyncIterator[int]:
    """A descriptor for the output of a command, of which at most the last `limit_bytes` are kept, in two files: when one is
    half of that, it becomes `PATH.old`. All that was written is in the log when the block is left.
    """
    log = _TwoFiles(path, max(limit_bytes // 2, 1))
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reading, False)

    def copy() -> bool:
        """Copy some of the output; False where there is none now."""
        with suppress(BlockingIOError):
            if data := os.read(reading, _READ_BYTES):
                log.write(data)
                return True
            loop.remove_reader(reading)
        return False

    loop = asyncio.get_running_loop()
    loop.add_reader(reading, copy)
    try:
        yield writing
    finally:
        loop.remove_reader(reading)
        os.close(writing)
        while copy():
            pass
        os.close(reading)
        log.close()


class _TwoFiles:
    def __init__(self, path: Path, half: int) -> None:
        self._path, self._half = path, half
        self._file = self._open()
        self._size = os.fstat(self._file).st_size

    def write(self, data: bytes) -> None:
        while data:
            part = data[: max(self._half - self._size, 1)]
            with suppress(OSError):  # a full disk must not end the command
                os.write(self._file, part)
            self._size += len(part)
            data = data[len(part) :]
            if self._size >= self._half:
                self.close()
                with suppress(OSError):
                    self._path.replace(f"{self._path}.old")
                self._file, self._size = self._open(), 0

    def close(self) -> None:
        os.close(self._file)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self._path, flags, 0o600)
        except OSError:
            return os.open(os.devnull, flags)  # a folder that was removed must not end the command
