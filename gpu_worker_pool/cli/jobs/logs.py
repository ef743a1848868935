"""`gpu-pool logs`: what a job has written."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.output import complain
from gpu_worker_pool.failure import REFUSED, Failure

from .jobs import complete_id, load_live, own_store

if TYPE_CHECKING:
    from .job_view import Job

_LOOK_S: Final = 0.2
_READ_BYTES: Final = 1 << 16


def logs(
    id_: Annotated[
        str | None,
        Argument(
            metavar="[ID]",
            help="A job: 12, or 12_3 for a task of an array. Without it: your last one.",
            complete=complete_id,
        ),
    ] = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Print what the job writes until it is over.")] = False,
    tail: Annotated[
        int | None, Option("--tail", metavar="NUMBER", min=0, max=10**9, help="Begin with the last lines only.")
    ] = None,
    attempt: Annotated[
        int | None,
        Option(metavar="NUMBER", min=1, max=1_000_000, help="An earlier attempt; by default the last one."),
    ] = None,
) -> int:
    """Print what a job has written to its standard output and standard error.

    The tasks of an array are printed one after the other. --follow waits for a job that has not started yet; Ctrl-C ends only
    the printing. Ends with 1 if there is no such job or no such attempt.
    """
    from .job_view import find_jobs, parse_ids, say_of_jobs  # noqa: PLC0415 - only where it is needed

    store = own_store()
    if id_ is None:
        numbers = store.numbers()
        if not numbers:
            raise Failure("you have submitted no job on this box; `gpu-pool submit -- CMD` submits one", REFUSED)
        id_ = str(max(numbers))
    (wanted,) = parse_ids([id_])
    # A job without a keeper would be followed for ever.
    records = load_live(store, [wanted.number]) if follow else store.load([wanted.number])
    meant = find_jobs(records, [id_])
    # Of those that have not run and never will, or that have not yet run, nothing can be printed.
    found: list[Job] = []
    silent: list[Job] = []
    for job in meant:
        is_silent = job.task.attempts == 0 and attempt is None and (job.task.state.is_over or not follow)
        (silent if is_silent else found).append(job)
    for number, job in enumerate(found):
        if len(meant) > 1:
            _print(f"{chr(10) if number else ''}==> {job.key} <==\n".encode())
        if attempt is not None and not OutputReader(_log(job, attempt)).is_there:
            raise Failure(f"job {job.key} has no output of an attempt {attempt}", REFUSED)
        if follow:
            _follow(job, attempt, tail)
        else:
            for data in OutputReader(_log(job, attempt or job.task.attempts), tail).read():
                _print(data)
    for state in dict.fromkeys(job.task.state for job in silent):
        keys = [job.key for job in silent if job.task.state is state]
        say_of_jobs(keys, f"has not run: it is {state}", f"have not run: they are {state}", complain)
    return 0


def _log(job: Job, attempt: int) -> Path:
    return job.record.log_of(job.key.index, attempt)


class OutputReader:
    """Reads the output of one attempt as it grows, from its last lines on if `tail` is given. A bounded one has two files, the
    older one beside it.
    """

    def __init__(self, path: Path, tail: int | None = None) -> None:
        self._path = path
        self._old = path.with_name(f"{path.name}.old")
        self._file: BufferedReader | None = None
        if tail is not None:
            self._skip_to(tail)

    def _skip_to(self, tail: int) -> None:
        for path in (self._path, self._old):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue
            if self._file is not None:
                self._file.close()
            self._file = file
            start, tail = _start_of_tail(file, tail)
            file.seek(start)
            if tail == 0:
                return

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


def _start_of_tail(file: BufferedReader, lines: int) -> tuple[int, int]:
    """Where the last lines of the file begin, and how many of them it does not have."""
    end = at = file.seek(0, os.SEEK_END)
    while at > 0 and lines > 0:
        begin = max(at - _READ_BYTES, 0)
        file.seek(begin)
        block = file.read(at - begin)
        # The end of the last line is not the beginning of another one.
        place = len(block) - (at == end and block.endswith(b"\n"))
        while lines > 0 and (place := block.rfind(b"\n", 0, place)) >= 0:
            lines -= 1
            if lines == 0:
                return begin + place + 1, 0
        at = begin
    return (end, 0) if lines == 0 else (0, lines - 1 if end else lines)


def _follow(job: Job, attempt: int | None, tail: int | None) -> None:
    """Print the output as it comes, and that of the next attempt where the job is run again. Of the journal only what is new
    is read.
    """
    record, index = job.record, job.key.index
    current = attempt or max(job.task.attempts, 1)
    reader, is_told = OutputReader(_log(job, current), tail), False
    while True:
        # The state is read before the output: what is written after that is read in the next round.
        record.refresh()
        task = record.submission.shown(index)
        state, attempts = task.state, task.attempts
        for data in reader.read():
            _print(data)
        if attempts > current and attempt is None:
            current += 1
            if _log(job, current) != _log(job, current - 1):  # those of a batch share a log
                reader = OutputReader(_log(job, current))
            continue
        if state.is_over or (attempt is not None and attempts > attempt):
            if attempts == 0:
                complain(f"job {job.key} has not run: it is {state}")
            return
        if attempts < current and not is_told:
            complain(f"job {job.key} is {state}; waiting for it")
            is_told = True
        time.sleep(_LOOK_S)


def _print(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
