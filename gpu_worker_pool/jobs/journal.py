"""The journal of a submission: its events, a JSON object a line, only ever appended to.

Commands, the keeper and the supervisors of its tasks all write to it, one at a time, under the lock of the file; each reads
what the others wrote before it writes. So a task is taken by one supervisor. A crash can cut only the last line short: that
event was not acted upon, and the next writer removes it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.host.failpoints import reach
from gpu_worker_pool.wire.reader import read

from .life import (
    CancelAsked,
    JobEvent,
    JobState,
    JobTerms,
    Requested,
    RunClosed,
    RunOpened,
    Submission,
    TaskEnded,
    TasksClosed,
    TasksRetried,
    TaskStarted,
)

_KINDS: Final[dict[str, type[Any]]] = {
    "requested": Requested,
    "opened": RunOpened,
    "started": TaskStarted,
    "ended": TaskEnded,
    "closed": RunClosed,
    "cancel": CancelAsked,
    "over": TasksClosed,
    "retried": TasksRetried,
}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}
_READ_BYTES: Final = 1 << 20


class JournalUnreadable(ValueError):  # noqa: N818 - it is about the file
    """The events of a submission cannot be read; the message says which."""


def encode(event: JobEvent) -> bytes:
    return json.dumps({"event": _NAMES[type(event)], **_facts(event)}).encode() + b"\n"


def _facts(event: JobEvent) -> dict[str, Any]:
    # Two of three lines of a sweep are these: `asdict` would take ten times as long.
    if isinstance(event, TaskStarted | TaskEnded):
        values = ((name, getattr(event, name)) for name in event.__slots__)
        return {name: value for name, value in values if value is not None}
    return asdict(event)


def decode(line: bytes) -> JobEvent:
    """Read one line; a ValueError where it is not an event."""
    data = json.loads(line)
    kind = _KINDS.get(str(data.pop("event", None))) if isinstance(data, dict) else None
    try:
        if kind is TaskStarted:
            return TaskStarted(**data)
        if kind is TaskEnded:
            return TaskEnded(becomes=JobState(data.pop("becomes")), **data)
    except (TypeError, KeyError) as error:
        raise ValueError(str(error)) from None
    event: JobEvent | None = None if kind is None else read(kind, data)
    if event is None:
        raise ValueError("it is not an event of a job")
    return event


class JobJournal:
    """A journal, and the submission as its events have made it. It stays open, so that a supervisor goes on where the name
    of the file is gone.
    """

    def __init__(self, path: Path, terms: JobTerms) -> None:
        """OSError where it cannot be opened. One that cannot be written can still be read."""
        self.path = path
        self.submission = Submission(terms)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except PermissionError:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # Where the events that were read end.
        self._offset = 0

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    def refresh(self) -> list[JobEvent]:
        """Take in what was written since the last time, and return it. JournalUnreadable where it is not an event, or not one
        that can have happened.
        """
        began, data, events = self._offset, b"", list[JobEvent]()
        size = os.fstat(self._descriptor).st_size
        if size < began:
            raise JournalUnreadable(f"{self.path}: it is shorter than it was")
        while size > began and (part := os.pread(self._descriptor, _READ_BYTES, began + len(data))):
            data += part
        *lines, _ = data.split(b"\n")
        for line in lines:
            try:
                events.append(decode(line))
                self.submission.evolve(events[-1])
            except ValueError as error:
                raise JournalUnreadable(f"{self.path}: byte {self._offset}: {error}") from None
            self._offset += len(line) + 1
        return events

    def write(self, decide: Callable[[Submission], Iterable[JobEvent]], *, is_synced: bool = True) -> list[JobEvent]:
        """Append the events that `decide` returns for the submission as it is now; no other process writes meanwhile. Each has
        happened when `decide` goes on to the next. On return they survive a power cut if `is_synced`. OSError where one cannot
        be written: then it has not happened.
        """
        written: list[JobEvent] = []
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            self.refresh()
            for event in decide(self.submission):
                self._append(encode(event))
                self.submission.evolve(event)
                written.append(event)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        if is_synced and written:
            os.fdatasync(self._descriptor)
            reach("after_append")
        return written

    def _append(self, data: bytes) -> None:
        reach("before_append")
        # A line that was cut short goes, so that this one begins on a line of its own.
        if os.fstat(self._descriptor).st_size != self._offset:
            os.ftruncate(self._descriptor, self._offset)
        try:
            if os.pwrite(self._descriptor, data, self._offset) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
        except OSError:
            os.ftruncate(self._descriptor, self._offset)
            raise
        self._offset += len(data)
        reach("in_append")
