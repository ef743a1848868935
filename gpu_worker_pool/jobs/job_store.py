"""The files of a user's jobs: a folder for each submission, in the user's state directory, for this user only.

    JOBS/12/job.json           what was submitted
    JOBS/12/environment.json   its environment
    JOBS/12/journal.jsonl      what happened to it and its tasks
    JOBS/12/output-1.log       what the first attempt wrote; for a task of an array 3-output-1.log, and so on
    JOBS/live/12               it is not over, or was not when the keeper looked last

A submission is there as a whole or not at all: its folder is made under another name, and renamed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from gpu_worker_pool.amounts import parse_span
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.state_dir import StateDirError, check_is_private, state_dir, sync_folder
from gpu_worker_pool.wire.reader import read

from .job_record import JobRecord
from .job_spec import JobSpec

SCHEMA: Final = "gpu-pool/job/2"
JOBS_DIR_VARIABLE: Final = "GPU_POOL_JOBS_DIR"
KEEP_VARIABLE: Final = "GPU_POOL_JOBS_KEEP"
_KEPT: Final = "30d"
_NOT_ROOT: Final = 1
_PRIVATE: Final = 0o700
_NEW: Final = ".new-"
# What a submit that died has left is removed after this time.
_LEFT_S: Final = 60.0
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")
_TASK_IN_JOURNAL: Final = re.compile(rb'"index": (\d+)')
logger = logging.getLogger(__name__)


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


def own_store() -> JobStore:
    """The jobs of this user, as this environment says where they are."""
    return JobStore(jobs_folder(os.environ))


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
            (self.root / "live").mkdir(mode=_PRIVATE, exist_ok=True)
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

    def check_room(self) -> None:
        """Failure where nothing can be written: jobs wait until that is repaired."""
        probe = self.root / f"{_NEW}probe-{os.getpid()}"
        try:
            _write(probe, " " * 4096)
        except OSError as error:
            raise Failure(
                f"nothing can be written to {self.root}: {error.strerror}; make room: until then no job is started, and none that "
                "has ended is shown as such"
            ) from None
        finally:
            with suppress(OSError):
                probe.unlink()

    # --- submissions ---------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, environment: Mapping[str, str]) -> int:
        """Write a submission to the disk; its number. Failure where it cannot be written: then there is none."""
        self.make()
        self._remove_left()
        new = self.root / f"{_NEW}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            new.mkdir(mode=_PRIVATE)
            _write(new / "job.json", {"schema": SCHEMA, **asdict(spec)})
            _write(new / "environment.json", dict(environment))
            # Its name is on the disk before the first event is: after a power cut no job that ran looks new.
            (new / "journal.jsonl").touch(mode=0o600)
            sync_folder(new)
            number = self.last_number() + 1
            while not self._call(new, number):
                number += 1
            sync_folder(self.root)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            raise Failure(
                f"the job cannot be written to {self.root}: {error.strerror}; fix that, and submit it again"
            ) from None
        return number

    def _call(self, new: Path, number: int) -> bool:
        """Give a new submission this number; False where another one has just got it."""
        self.note_live(number)
        try:
            new.rename(self.root / str(number))
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            return False
        return True

    def last_number(self) -> int:
        """The number of the last submission; 0 where there was none."""
        return max(self.numbers(), default=0)

    def numbers(self) -> list[int]:
        return _numbers_in(self.root)

    def _remove_left(self) -> None:
        """Remove what submits that died have left: it has the environment of its user, secrets and all."""
        for path in self.root.glob(f"{_NEW}*-*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _LEFT_S:
                    shutil.rmtree(path, ignore_errors=True)

    # --- which are live ------------------------------------------------------------------------------------------------

    def live_numbers(self) -> list[int]:
        """The submissions that may not be over: those that are need not be read."""
        return _numbers_in(self.root / "live")

    def note_live(self, number: int) -> None:
        (self.root / "live" / str(number)).touch(mode=0o600)

    def note_over(self, record: JobRecord) -> None:
        """Note that it is over, unless a retry came in between."""
        with suppress(OSError):
            (self.root / "live" / str(record.number)).unlink()
        record.refresh()
        if not record.submission.is_over and record.folder.is_dir():
            self.note_live(record.number)

    # --- reading -------------------------------------------------------------------------------------------------------

    def load(self, numbers: Iterable[int] | None = None) -> dict[int, JobRecord]:
        """The submissions of these numbers, or all, in the order of their numbers."""
        found = (self.load_one(number) for number in (self.numbers() if numbers is None else numbers))
        return {record.number: record for record in found if record is not None}

    def load_one(self, number: int) -> JobRecord | None:
        """A submission; None where there is none."""
        folder = self.root / str(number)
        trouble: str | None = None
        try:
            spec = _read_spec(folder / "job.json")
        except (OSError, ValueError) as error:
            if not folder.is_dir():
                return None
            # What runs goes on, by its journal.
            trouble, spec = f"{folder / 'job.json'}: {error}", _unknown_spec(folder)
        return JobRecord(number, spec, folder, trouble)

    def environment_of(self, number: int) -> dict[str, str]:
        """The environment in which it was submitted; Failure where it cannot be read."""
        path = self.root / str(number) / "environment.json"
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise Failure(f"the environment of job {number} cannot be read from {path}: {error}") from None
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    def forget(self, number: int) -> None:
        """Remove a submission. The folder is renamed first, so that no half of it is ever seen. The last one stays: no number is
        used twice.
        """
        if number == self.last_number():
            return
        gone = self.root / f"{_NEW}gone-{number}-{secrets.token_hex(4)}"
        with suppress(OSError):
            (self.root / str(number)).rename(gone)
            (self.root / "live" / str(number)).unlink(missing_ok=True)
        shutil.rmtree(gone, ignore_errors=True)


def _numbers_in(folder: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(folder) if _NUMBER.fullmatch(name))  # noqa: PTH208
    except FileNotFoundError:
        return []


def _read_spec(path: Path) -> JobSpec:
    """What was submitted; a ValueError says what is wrong with it."""
    data = json.loads(path.read_bytes())
    found = read(JobSpec, data) if isinstance(data, dict) and data.get("schema") == SCHEMA else None
    if found is None or not found.command:
        raise ValueError(f"it is not a job of {SCHEMA}")
    return found


def _unknown_spec(folder: Path) -> JobSpec:
    """Stands for a submission that cannot be read, with the tasks that have begun."""
    try:
        indices = {int(index) for index in _TASK_IN_JOURNAL.findall((folder / "journal.jsonl").read_bytes())}
    except OSError:
        indices = set()
    at = folder.stat().st_mtime
    return JobSpec(submitted_at=at, command=("?",), label="?", cwd="/", array=tuple(sorted(indices)) or None)


def _write(path: Path, data: object) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        data_left = json.dumps(data).encode()
        while data_left:
            data_left = data_left[os.write(descriptor, data_left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def kept_s(environ: Mapping[str, str]) -> float:
    """GPU_POOL_JOBS_KEEP in seconds; a bad value is logged, and the default is used."""
    try:
        return check_keep(environ)
    except ValueError as error:
        logger.error("%s; using the default %s", error, _KEPT)  # noqa: TRY400 - a sentence is enough
        return parse_span(_KEPT)


def check_keep(environ: Mapping[str, str]) -> float:
    """GPU_POOL_JOBS_KEEP in seconds; ValueError where it is not a duration."""
    return parse_span(environ.get(KEEP_VARIABLE, "").strip() or _KEPT, KEEP_VARIABLE)
