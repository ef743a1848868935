"""The journal of one job: its events, a JSON object a line, only ever appended to.

A crash can cut only the last line short. That event was not acted upon, and is left out.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.host.failpoints import reach
from gpu_worker_pool.host.state_dir import sync_folder
from gpu_worker_pool.jobs.life import (
    CancelAsked,
    JobClosed,
    JobEvent,
    JobRequested,
    JobRetried,
    RunEnded,
    RunNotStarted,
    RunStarted,
    UsageMeasured,
)
from gpu_worker_pool.wire.reader import read

_KINDS: Final[dict[str, type[Any]]] = {
    "requested": JobRequested,
    "started": RunStarted,
    "not_started": RunNotStarted,
    "measured": UsageMeasured,
    "ended": RunEnded,
    "cancel_asked": CancelAsked,
    "closed": JobClosed,
    "retried": JobRetried,
}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


class JournalUnreadable(ValueError):  # noqa: N818 - it is about the file
    """The events of a job cannot be read; the message says which line."""


def encode(event: JobEvent) -> bytes:
    return json.dumps({"event": _NAMES[type(event)], **asdict(event)}).encode() + b"\n"


def decode(line: bytes) -> JobEvent:
    """Read one line; a ValueError where it is not an event."""
    data = json.loads(line)
    kind = _KINDS.get(str(data.get("event"))) if isinstance(data, dict) else None
    event: JobEvent | None = None if kind is None else read(kind, data)
    if event is None:
        raise ValueError("it is not an event of a job")
    return event


def read_events(path: Path) -> list[JobEvent]:
    """The whole lines; none where there is no file yet."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JournalUnreadable(f"{path}: {error.strerror}") from None
    return list(_decoded(path, lines))


def _decoded(path: Path, lines: Sequence[bytes]) -> Iterator[JobEvent]:
    for number, line in enumerate(lines, start=1):
        try:
            yield decode(line)
        except ValueError as error:
            raise JournalUnreadable(f"{path}: line {number}: {error}") from None


def append(path: Path, event: JobEvent, *, is_synced: bool) -> None:
    """Append an event as a whole, or raise OSError and leave nothing of it. Synced, it is on the disk on return."""
    reach("before_append")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    is_new = not path.exists()
    descriptor = os.open(path, flags, 0o600)
    try:
        # A line that was cut short is overwritten, so that this one begins on a line of its own.
        end = _end_of_lines(descriptor)
        os.ftruncate(descriptor, end)
        data = encode(event)
        try:
            if os.pwrite(descriptor, data, end) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
            reach("in_append")
            if is_synced:
                os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)
    if is_new and is_synced:
        sync_folder(path.parent)
    reach("after_append")


def _end_of_lines(descriptor: int) -> int:
    """Where the last whole line ends."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(end - 4096, 0)
        place = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if place >= 0:
            return begin + place + 1
        end = begin
    return 0


def sync_all(path: Path) -> None:
    """Have all that was written to the file system of this folder on the disk: for many files, quicker than one by one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)
