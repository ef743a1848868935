"""The lines of a batch, and the file that says which of them were done in an earlier run."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

from gpu_worker_pool.failure import Failure

HEADER: Final = json.dumps({"schema": "gpu-pool/batch-state/1"})


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the file. `key` stays the same when other lines are added or removed."""

    key: str
    number: int
    command: str

    def log_in(self, folder: Path) -> Path:
        """Its log. The number is for people; the key keeps the logs of two lines apart when lines are added."""
        return folder / f"line-{self.number:04d}-{self.key[:8]}.log"


def read_lines(text: str) -> list[Line]:
    """The lines that are commands; blank ones and those that begin with # are skipped. Only a newline ends a line:
    str.splitlines would also split a command at a form feed or at U+2028. ValueError for a line that cannot be a command.
    """
    seen: Counter[str] = Counter()
    lines = []
    # Some editors mark a file as UTF-8 by its first character.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        command = line.strip()
        if "\0" in command:
            raise ValueError(f"line {number} has a NUL character, which no command can have")
        if not command or command.startswith("#"):
            continue
        seen[command] += 1
        digest = sha256(command.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        lines.append(Line(f"{digest}-{seen[command]}", number, command))
    return lines


def is_good(record: Mapping[str, Any]) -> bool:
    """Whether a record of an attempt says that the line is done."""
    return "job" in record and record.get("exit_code") == 0 and record.get("end_reason") is None


class StateFile:
    """A state file, open and locked. Failure where another batch has it open, or where it is another kind of file.

    It has a record for each attempt, and one for each submission of the batch: what a batch that was killed did not write
    here is in the journal of its last submission.
    """

    def __init__(self, path: Path, *, is_fresh: bool) -> None:
        self._path, self._is_fresh = path, is_fresh
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise Failure(
                f"the state file {path} cannot be used: {error.strerror}; name another with --state"
            ) from None
        why = None if stat.S_ISREG(os.fstat(self._descriptor).st_mode) else f"{path} is not a regular file;"
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = f"another gpu-pool batch works with {path}; wait for it, or"
        if why is not None:
            os.close(self._descriptor)
            raise Failure(f"{why} name another with --state")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def load(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
        """The records of the lines that were done, by key, and that of the last submission. None where the file is to be fresh,
        which empties it.
        """
        records = self._records()  # read also then, so that only a state file is ever emptied
        if self._is_fresh:
            os.ftruncate(self._descriptor, 0)
            records = []
        if not records:
            self.append(json.loads(HEADER))
        done = {str(record["job"]): record for record in records[1:] if is_good(record)}
        return done, next((record for record in reversed(records) if "submission" in record), None)

    def append(self, record: Mapping[str, Any]) -> None:
        try:
            data = json.dumps(record).encode() + b"\n"
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise Failure(
                f"the state file {self._path} cannot be written: {error.strerror}; "
                "fix that, then run the same command again"
            ) from None

    def _records(self) -> list[dict[str, Any]]:
        try:
            with open(self._descriptor, encoding="utf-8", closefd=False) as file:
                *lines, torn = file.read().split("\n")
            records = [json.loads(line) for line in lines]
            first = lines[0] if lines else torn
            if not (first == HEADER or (not lines and HEADER.startswith(first))):
                raise ValueError("its first line is not that of a state file")  # noqa: TRY301
            if not all("job" in record or "submission" in record for record in records[1:]):
                raise ValueError("a line has no job")  # noqa: TRY301
        except (ValueError, TypeError, OSError) as error:
            raise Failure(
                f"{self._path} is not the state file of a batch ({error}); name another with --state"
            ) from None
        if torn:
            # A crash cut it short. It is removed, so that the next record begins on a new line.
            os.ftruncate(self._descriptor, sum(len(line.encode()) + 1 for line in lines))
        return records
