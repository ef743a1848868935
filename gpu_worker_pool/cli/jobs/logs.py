"""`gpu-pool logs`: what a job has written."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.failure import REFUSED, Failure
from gpu_worker_pool.cli.output import complain

from .jobs import JobId, load_live

if TYPE_CHECKING:
    from .job_store import JobRecord, JobStore

_LOOK_S: Final = 0.2
_READ_BYTES: Final = 1 << 16


def logs(
    id_: JobId,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Go on until the job is over, and wait for its start.")
    ] = False,
    attempt: Annotated[
        int | None,
        Option(metavar="NUMBER", min=1, max=1_000_000, help="Which attempt; by default the last one."),
    ] = None,
) -> int:
    """Print what a job has written to its standard output and standard error.

    Of an array all tasks, one after the other. With --follow it ends when the job is over; Ctrl-C ends it before, and the
    job goes on. Ends with 1 if there is no such job or no such attempt.
    """
    from .job_store import JobStore, jobs_folder  # noqa: PLC0415 - only where it is needed
    from .job_view import find_jobs, say_of_jobs  # noqa: PLC0415

    store = JobStore(jobs_folder(os.environ))
    # A job without a keeper would be followed for ever.
    meant = find_jobs(load_live(store)[0] if follow else store.load(), [id_])
    # Of those that have not run and never will, or that have not yet run, nothing can be printed.
    found: list[JobRecord] = []
    silent: list[JobRecord] = []
    for record in meant:
        is_silent = record.life.attempts == 0 and attempt is None and (record.life.state.is_over or not follow)
        (silent if is_silent else found).append(record)
    for number, record in enumerate(found):
        if len(meant) > 1:
            _print(f"{chr(10) if number else ''}==> {record.key} <==\n".encode())
        if attempt is not None and not OutputReader(record.log_of(attempt)).is_there:
            raise Failure(f"job {record.key} has no output of an attempt {attempt}", REFUSED)
        if follow:
            _follow(store, record, attempt)
        else:
            for data in OutputReader(record.log_of(attempt or record.life.attempts)).read():
                _print(data)
    for state in dict.fromkeys(record.life.state for record in silent):
        keys = [str(record.key) for record in silent if record.life.state is state]
        say_of_jobs(keys, f"has not run: it is {state}", f"have not run: they are {state}", complain)
    return 0


class OutputReader:
    """Reads the output of one attempt as it grows. A bounded one has two files, the older one beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._old = path.with_name(f"{path.name}.old")
        self._file: BufferedReader | None = None

    @property
    def is_there(self) -> bool:
        return self._path.exists() or self._old.exists()

    def read(self) -> Iterator[bytes]:
        """What has been written since the last time."""
        if self._file is None and self._old.exists():
            self._file = self._old.open("rb")
        while True:
            if self._file is None:
                try:
                    self._file = self._path.open("rb")
                except FileNotFoundError:
                    return
            while data := self._file.read(_READ_BYTES):
                yield data
            try:
                is_current = os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
            except FileNotFoundError:
                return
            if is_current:
                return
            self._file.close()  # it has become the older one
            self._file = None


def _follow(store: JobStore, record: JobRecord, attempt: int | None) -> None:
    """Print the output as it comes, and that of the next attempt where the job is run again."""
    current = attempt or max(record.life.attempts, 1)
    reader, is_told = OutputReader(record.log_of(current)), False
    while True:
        # The state is read before the output: what is written after that is read in the next round.
        life = record.life
        for data in reader.read():
            _print(data)
        if life.attempts > current and attempt is None:
            current += 1
            reader = OutputReader(record.log_of(current))
            continue
        if life.state.is_over or (attempt is not None and life.attempts > attempt):
            if life.attempts == 0:
                complain(f"job {record.key} has not run: it is {life.state}")
            return
        if life.attempts < current and not is_told:
            complain(f"job {record.key} is {life.state}; waiting for it")
            is_told = True
        time.sleep(_LOOK_S)
        _look(store, record)


def _look(store: JobStore, record: JobRecord) -> None:
    for found in store.load_number(record.key.number):
        if found.key == record.key:
            record.life = found.life


def _print(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
