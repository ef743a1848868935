"""The files of a user's jobs: a folder for each submission, in the user's state directory, for this user only.

    JOBS/12/job.json           what was submitted
    JOBS/12/environment.json   its environment
    JOBS/12/events.jsonl       what happened to it; for a task of an array JOBS/12/3/events.jsonl, and so on
    JOBS/12/output-1.log       what the first attempt wrote
    JOBS/12/outcome-1.json     how it ended, from its guard

A submission is there as a whole or not at all: its folder is made under another name, and renamed. Only the keeper writes
events.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.core.jobs.job_key import JobKey
from gpu_worker_pool.core.jobs.life import ImpossibleEvent, JobEvent, JobLife, JobState, evolve, replay
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.state_dir import check_is_private, state_dir

from .job_journal import JournalUnreadable, append, read_events, sync_folder
from .job_spec import JobSpec

JOBS_DIR_VARIABLE: Final = "GPU_POOL_JOBS_DIR"
_NOT_ROOT: Final = 1
_PRIVATE: Final = 0o700
_NEW: Final = ".new-"


@dataclass(slots=True)
class JobRecord:
    """A job with what its files say. `trouble`: its journal cannot be read, so it is left alone."""

    key: JobKey
    spec: JobSpec
    life: JobLife
    folder: Path
    trouble: str | None = None

    @property
    def log(self) -> Path:
        return self.log_of(self.life.attempts)

    def log_of(self, attempt: int) -> Path:
        return self.folder / f"output-{attempt}.log"

    def outcome_of(self, attempt: int) -> Path:
        return self.folder / f"outcome-{attempt}.json"


def jobs_folder(environ: Mapping[str, str]) -> Path:
    """GPU_POOL_JOBS_DIR, else a folder of the user's state directory. Boxes may share a home: each has its own folder."""
    if given := environ.get(JOBS_DIR_VARIABLE, "").strip():
        return Path(given).expanduser().absolute()
    try:
        own = state_dir(None, {**environ, "STATE_DIRECTORY": ""}, platform=sys.platform, uid=os.getuid() or _NOT_ROOT)
    except JournalError:
        raise Failure(
            f"there is no home directory to keep jobs in; set {JOBS_DIR_VARIABLE} to a folder of yours"
        ) from None
    return own / "jobs" / (socket.gethostname().partition(".")[0] or "localhost")


class JobStore:
    """The folder of one user's jobs on one box."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self) -> None:
        """Make the folder; Failure where it cannot be had, or where other users could read or write it."""
        try:
            self.root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            check_is_private(self.root)
            if self.root.stat().st_mode & 0o077:
                self.root.chmod(_PRIVATE)
        except JournalError as error:
            raise Failure(str(error).replace("GPU_POOL_STATE_DIR", JOBS_DIR_VARIABLE)) from None
        except OSError as error:
            raise Failure(
                f"the folder {self.root} for jobs cannot be used: {error.strerror}; set {JOBS_DIR_VARIABLE} to another"
            ) from None

    # --- submissions ---------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, environment: Mapping[str, str]) -> int:
        """Write a submission to the disk; its number. Failure where it cannot be written: then there is none."""
        self.make()
        new = self.root / f"{_NEW}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            new.mkdir(mode=_PRIVATE)
            _write(new / "job.json", spec.as_json())
            _write(new / "environment.json", dict(environment))
            sync_folder(new)
            with self._numbering():
                number = self.last_number() + 1
                _write(self.root / f"{_NEW}last", number)
                (self.root / f"{_NEW}last").replace(self.root / "last-id")
                new.rename(self.root / str(number))
                sync_folder(self.root)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            raise Failure(
                f"the job cannot be written to {self.root}: {error.strerror}; fix that, and submit it again"
            ) from None
        return number

    def last_number(self) -> int:
        """The number of the last submission; 0 where there was none."""
        try:
            last = int((self.root / "last-id").read_text(encoding="ascii"))
        except (OSError, ValueError):
            last = 0
        return max([last, *self.numbers()])

    def numbers(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self.root) if name.isascii() and name.isdigit())  # noqa: PTH208
        except FileNotFoundError:
            return []

    @contextmanager
    def _numbering(self) -> Iterator[None]:
        """Submit one at a time."""
        descriptor = os.open(self.root / "submit.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # --- reading -------------------------------------------------------------------------------------------------------

    def load(self) -> dict[JobKey, JobRecord]:
        """Every job, in the order of their numbers."""
        return {record.key: record for number in self.numbers() for record in self.load_number(number)}

    def load_number(self, number: int) -> list[JobRecord]:
        """The jobs of one submission; none where there is no such submission, or it cannot be read."""
        top = self.root / str(number)
        try:
            spec = JobSpec.from_json(json.loads((top / "job.json").read_bytes()))
        except (OSError, ValueError):
            return []
        return [self._load(key, spec) for key in spec.keys(number)]

    def _load(self, key: JobKey, spec: JobSpec) -> JobRecord:
        folder = self.folder_of(key)
        life = JobLife(spec.terms(key))
        try:
            return JobRecord(key, spec, replay(life.terms, read_events(folder / "events.jsonl")), folder)
        except (JournalUnreadable, ImpossibleEvent) as error:
            # It may have run: it is never run again by itself.
            return JobRecord(key, spec, JobLife(life.terms, JobState.INTERRUPTED, why=str(error)), folder, str(error))

    def folder_of(self, key: JobKey) -> Path:
        top = self.root / str(key.number)
        return top if key.index is None else top / str(key.index)

    def environment_of(self, key: JobKey) -> dict[str, str]:
        """The environment in which it was submitted; Failure where it cannot be read."""
        path = self.root / str(key.number) / "environment.json"
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise Failure(f"the environment of job {key} cannot be read from {path}: {error}") from None
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    # --- writing -------------------------------------------------------------------------------------------------------

    def note(self, record: JobRecord, event: JobEvent, *, is_synced: bool = True) -> None:
        """Write an event, then let it happen to the record. OSError where it cannot be written: then it has not happened."""
        life = evolve(record.life, event)
        record.folder.mkdir(mode=_PRIVATE, exist_ok=True)
        append(record.folder / "events.jsonl", event, is_synced=is_synced)
        record.life = life

    def forget(self, number: int) -> None:
        """Remove a submission. The folder is renamed first, so that no half of it is ever seen."""
        gone = self.root / f"{_NEW}gone-{number}-{secrets.token_hex(4)}"
        with suppress(OSError):
            (self.root / str(number)).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def read_outcome(path: Path) -> dict[str, Any] | None:
    """What a guard wrote down; None where it wrote nothing."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, data: object) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        data_left = json.dumps(data).encode()
        while data_left:
            data_left = data_left[os.write(descriptor, data_left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
