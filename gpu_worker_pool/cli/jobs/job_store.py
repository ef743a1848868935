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
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.host.state_dir import StateDirError, check_is_private, state_dir, sync_folder
from gpu_worker_pool.jobs.job_key import JobKey
from gpu_worker_pool.jobs.life import ImpossibleEvent, JobEvent, JobLife, JobState, evolve, replay

from .job_journal import JournalUnreadable, append, read_events
from .job_spec import JobSpec

JOBS_DIR_VARIABLE: Final = "GPU_POOL_JOBS_DIR"
_NOT_ROOT: Final = 1
_PRIVATE: Final = 0o700
_NEW: Final = ".new-"
# No user has submitted more; a file with a greater one is damaged.
MAX_NUMBER: Final = 999_999_999
_LOST_EVENTS: Final = (
    "its journal is damaged: it has a log of an attempt that the journal does not know; see whether it still runs, and use "
    "`gpu-pool retry`"
)


@dataclass(slots=True)
class JobRecord:
    """A job with what its files say. `trouble`: they cannot be read, so it is left alone. `why_not_run`: it is not run by itself,
    for what its files say is not all. `unwritten`: an event that has happened, and is written before the next one.
    """

    key: JobKey
    spec: JobSpec
    life: JobLife
    folder: Path
    trouble: str | None = None
    why_not_run: str | None = None
    unwritten: JobEvent | None = None

    @property
    def is_unreadable(self) -> bool:
        """Whether it may be live, and its files do not say so as they should."""
        return self.trouble is not None and not self.life.state.is_over

    def make_folder(self) -> None:
        """Make the folder of a task. That of a submission is there, or was removed."""
        if self.key.index is not None:
            self.folder.mkdir(mode=_PRIVATE, exist_ok=True)

    @property
    def log(self) -> Path:
        return self.log_of(self.life.attempts)

    def log_of(self, attempt: int) -> Path:
        return self.folder / f"output-{attempt}.log"

    @property
    def new_log(self) -> Path:
        """The log of an attempt that is about to start."""
        return self.folder / "output-new.log"

    def outcome_of(self, attempt: int) -> Path:
        return self.folder / f"outcome-{attempt}.json"


def jobs_folder(environ: Mapping[str, str]) -> Path:
    """GPU_POOL_JOBS_DIR, else a folder of the user's state directory. Boxes may share a home: each has its own folder."""
    if given := environ.get(JOBS_DIR_VARIABLE, "").strip():
        return Path(given).expanduser().absolute()
    try:
        own = state_dir(None, {**environ, "STATE_DIRECTORY": ""}, platform=sys.platform, uid=os.getuid() or _NOT_ROOT)
    except StateDirError:
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
        except StateDirError:
            found = self.root.stat()
            raise Failure(
                f"other users could change the folder {self.root} of your jobs (mode {stat.S_IMODE(found.st_mode):04o}, uid "
                f"{found.st_uid}), and so run commands as you; make sure that nothing in it was changed, and use chmod go-w "
                f"{self.root}, or set {JOBS_DIR_VARIABLE} to a folder of your own"
            ) from None
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
                if number > MAX_NUMBER:
                    shutil.rmtree(new, ignore_errors=True)
                    raise Failure(
                        f"the last job of {self.root} has the number {number - 1}, and a number must be at most {MAX_NUMBER}; "
                        f"if {self.root / 'last-id'} is damaged, write the number of the last job into it"
                    )
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
        """The jobs of one submission; none where there is no such submission."""
        path, trouble = self.root / str(number) / "job.json", None
        try:
            spec = JobSpec.from_json(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            if not path.parent.is_dir():
                return []
            # What runs goes on, by its journal.
            trouble, spec = f"{path}: {error}", _unknown_spec(path.parent)
        records = [self._load(key, spec) for key in spec.keys(number)]
        for record in records if trouble else ():
            record.trouble = record.why_not_run = trouble
            if not record.life.state.is_over and record.life.state is not JobState.RUNNING:
                record.life = JobLife(record.life.terms, JobState.INTERRUPTED, why=trouble)
        return records

    def _load(self, key: JobKey, spec: JobSpec) -> JobRecord:
        folder = self.folder_of(key)
        life = JobLife(spec.terms(key))
        try:
            found = JobRecord(key, spec, replay(life.terms, read_events(folder / "events.jsonl")), folder)
        except (JournalUnreadable, ImpossibleEvent) as error:
            # It may have run: it is never run again by itself.
            return JobRecord(key, spec, JobLife(life.terms, JobState.INTERRUPTED, why=str(error)), folder, str(error))
        # A log has its name only once the journal says that its attempt has started; a retry by the user begins again.
        is_new = found.life.state in {JobState.SUBMITTED, JobState.WAITING} and found.life.behind is None
        if is_new and found.log_of(found.life.attempts + 1).exists():
            found.why_not_run = _LOST_EVENTS
        return found

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
        record.make_folder()
        if record.unwritten is not None:
            append(record.folder / "events.jsonl", record.unwritten, is_synced=False)
            record.unwritten = None
        append(record.folder / "events.jsonl", event, is_synced=is_synced)
        record.life = life

    def forget(self, number: int) -> None:
        """Remove a submission. The folder is renamed first, so that no half of it is ever seen."""
        gone = self.root / f"{_NEW}gone-{number}-{secrets.token_hex(4)}"
        with suppress(OSError):
            (self.root / str(number)).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _unknown_spec(folder: Path) -> JobSpec:
    """Stands for a submission that cannot be read, with the tasks that have begun."""
    indices = sorted(int(path.name) for path in folder.iterdir() if path.name.isascii() and path.name.isdigit())
    at = folder.stat().st_mtime
    return JobSpec(submitted_at=at, command=("?",), label="?", cwd="/", array=tuple(indices) or None)


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
