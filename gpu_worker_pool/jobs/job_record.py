"""A submission and its journal: its records, a JSON object a line, only ever appended to.

Commands, the keeper and the supervisors of its tasks all write to it, one at a time, under the lock of the file; each reads
what the others wrote before it writes. So a task is taken by one supervisor. A crash can cut only the last line short: that
record was not acted upon, and the next writer removes it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.host.state_dir import reach
from gpu_worker_pool.wire.reader import read

from .job_spec import JobSpec
from .submission import JobState, JobTask, Record, Run, Submission, Whole, closed

_READ_BYTES: Final = 1 << 20
_OF_TASK: Final = {item.name: item.default for item in fields(JobTask)}
# A task before and after a change.
TaskChange = tuple[JobTask, JobTask]
Decide = Callable[[Submission], Iterable[Record]]


def encode(record: Record) -> bytes:
    if isinstance(record, JobTask):
        values = {name: getattr(record, name) for name in _OF_TASK}
        return _line("task", {name: value for name, value in values.items() if value != _OF_TASK[name]})
    return _line("run" if isinstance(record, Run) else "whole", asdict(record))


def _line(kind: str, facts: dict[str, Any]) -> bytes:
    return json.dumps({kind: facts}).encode() + b"\n"


def decode(line: bytes) -> Record:
    """Read one line; a ValueError where it is not a record."""
    data = json.loads(line)
    ((kind, facts),) = data.items() if isinstance(data, dict) and len(data) == 1 else (("", {}),)
    found: Record | None = None
    try:
        if kind == "task":
            # By hand: nearly all lines of a sweep are these.
            found = JobTask(**{**facts, "state": JobState(facts.get("state", JobState.SUBMITTED))})
        elif kind == "run":
            found = read(Run, facts)
        elif kind == "whole":
            found = Whole(**facts)
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None
    if found is None:
        raise ValueError("it is not a record of a job")
    return found


class JobRecord:
    """A submission with what its files say. `trouble`: they cannot be read, so nothing of it is started.

    Its journal stays open, so that a supervisor goes on where the name of the file is gone.
    """

    def __init__(self, number: int, spec: JobSpec, folder: Path, trouble: str | None = None) -> None:
        self.number, self.folder = number, folder
        self.trouble: str | None = None
        self.submission = Submission(number, spec)
        # Whether records that were read are not in its journal any more.
        self.is_cut = False
        # Where the records that were read end.
        self._offset = 0
        self._journal, path = -1, folder / "journal.jsonl"
        try:
            try:
                self._journal = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except PermissionError:
                self._journal = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._fail(error.strerror or str(error))
        self.refresh()
        if trouble is not None and self.trouble is None:
            self._fail(trouble)

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        descriptor, self._journal = getattr(self, "_journal", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def spec(self) -> JobSpec:
        return self.submission.spec

    def refresh(self) -> list[TaskChange]:
        """Take in what was written since the last time; how tasks have changed. What cannot be read is the `trouble`."""
        changes: list[TaskChange] = []
        if self._journal >= 0:
            try:
                self._read(changes)
            except (OSError, ValueError) as error:
                self._close()
                self._fail((error.strerror if isinstance(error, OSError) else None) or str(error))
        return changes

    def _read(self, changes: list[TaskChange]) -> None:
        began, data = self._offset, b""
        size = os.fstat(self._journal).st_size
        if size < began:
            self.is_cut = True
            raise ValueError(f"{self.folder / 'journal.jsonl'}: it is shorter than it was")
        while size > began and (part := os.pread(self._journal, _READ_BYTES, began + len(data))):
            data += part
        *lines, _ = data.split(b"\n")
        for line in lines:
            try:
                self._apply(decode(line), changes)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.folder / 'journal.jsonl'}: byte {self._offset}: {error}") from None
            self._offset += len(line) + 1

    def _apply(self, record: Record, changes: list[TaskChange]) -> None:
        if isinstance(record, JobTask):
            changes.append((self.submission.task(record.index), record))
        self.submission.apply(record)

    def write(self, decide: Decide, *, is_synced: bool = True) -> list[Record]:
        """Append the records that `decide` returns for the submission as it is now; no other process writes meanwhile. Each
        counts when `decide` goes on to the next. On return they survive a power cut if `is_synced`. OSError where one cannot be
        written: then it does not count.
        """
        written: list[Record] = []
        if self._journal >= 0:
            fcntl.flock(self._journal, fcntl.LOCK_EX)
        try:
            self.refresh()
            if self._journal < 0:
                raise OSError(self.trouble)
            for record in decide(self.submission):
                self._append(encode(record))
                self.submission.apply(record)
                written.append(record)
        finally:
            if self._journal >= 0:
                fcntl.flock(self._journal, fcntl.LOCK_UN)
        if is_synced and written:
            os.fdatasync(self._journal)
            reach("after_append")
        return written

    def _append(self, data: bytes) -> None:
        reach("before_append")
        # A line that was cut short goes, so that this one begins on a line of its own.
        if os.fstat(self._journal).st_size != self._offset:
            os.ftruncate(self._journal, self._offset)
        try:
            if os.pwrite(self._journal, data, self._offset) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
        except OSError:
            os.ftruncate(self._journal, self._offset)
            raise
        self._offset += len(data)
        reach("in_append")

    def _fail(self, trouble: str) -> None:
        """It may have run: what is not known to be over is never run again by itself."""
        self.trouble = trouble
        for task in closed(self.submission, time.time(), JobState.INTERRUPTED, trouble):
            self.submission.apply(task)

    def log_of(self, index: int | None, attempt: int) -> Path:
        """What this attempt wrote. The attempts at a line of a batch share a log."""
        if self.spec.batch is not None and index is not None:
            return Path(self.spec.batch.logs[self.spec.place_of(index)])
        return self.folder / f"{'' if index is None else f'{index}-'}output-{attempt}.log"
