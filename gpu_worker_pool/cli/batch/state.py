"""The state file of a batch: the attempts so far, so that a later run continues from there.

The file has one JSON object a line and is only appended to. A crash can cut only the last line short, and that line is
left out.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any, Self

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.wire.reader import read_time

from .jobs import Job, Outcome

HEADER = json.dumps({"schema": "gpu-pool/batch-state/1"})


class StateFile:
    """A state file, open and locked. Failure where another batch has it open, or where it is another kind of file."""

    def __init__(self, path: Path, *, is_fresh: bool) -> None:
        self._path = path
        self._is_fresh = is_fresh
        self._descriptor = -1

    def __enter__(self) -> Self:
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise Failure(
                f"the state file {self._path} cannot be used: {error.strerror}; name another with --state"
            ) from None
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.close(self._descriptor)
            raise Failure(f"{self._path} is not a regular file; name another with --state")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise Failure(
                f"another gpu-pool batch works with {self._path}; wait for it, or name another with --state"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def load(self) -> dict[str, Outcome]:
        """The outcomes of the jobs that were done, by key; none where the file is to be fresh, which empties it."""
        records = self._records()  # read also then, so that only a state file is ever emptied
        if self._is_fresh:
            os.ftruncate(self._descriptor, 0)
            records = []
        if not records:
            self._append(json.loads(HEADER))
        done: dict[str, Outcome] = {}
        for record in records[1:]:
            if record.get("exit_code") == 0:
                started_at, ended_at = (read_time(str(record.get(name))) for name in ("started_at", "ended_at"))
                gpus = tuple(record.get("gpus") or ())
                done[record["job"]] = Outcome(0, record.get("why"), gpus, started_at, ended_at, record.get("log"))
        return done

    def note(self, job: Job, attempt: int, outcome: Outcome) -> None:
        """Append an attempt. It is on the disk when this returns."""
        about = {"job": job.key, "line": job.line, "command": job.command, "attempt": attempt}
        self._append({**about, **outcome.as_json()})

    def _records(self) -> list[dict[str, Any]]:
        try:
            with open(self._descriptor, encoding="utf-8", closefd=False) as file:
                *lines, torn = file.read().split("\n")
            records = [json.loads(line) for line in lines]
            first = lines[0] if lines else torn
            if not (first == HEADER or (not lines and HEADER.startswith(first))):
                raise ValueError("its first line is not that of a state file")  # noqa: TRY301
            if not all(isinstance(record.get("job"), str) for record in records[1:]):
                raise ValueError("a line has no job")  # noqa: TRY301
        except (ValueError, AttributeError, OSError) as error:
            raise Failure(
                f"{self._path} is not the state file of a batch ({error}); name another with --state"
            ) from None
        if torn:
            # A crash cut it short. It is removed, so that the next record begins on a new line.
            os.ftruncate(self._descriptor, sum(len(line.encode()) + 1 for line in lines))
        return records

    def _append(self, record: dict[str, Any]) -> None:
        data = json.dumps(record).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise Failure(
                f"the state file {self._path} cannot be written: {error.strerror}; "
                "fix that, then run the same command again"
            ) from None
