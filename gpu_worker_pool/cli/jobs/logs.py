"""`gpu-pool logs`: what a job has written."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from itertools import chain
from typing import Annotated, Final

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.output import complain
from gpu_worker_pool.failure import REFUSED, Failure
from gpu_worker_pool.jobs.job_store import own_store

from .job_view import Job, find_jobs, parse_ids, say_of_jobs
from .jobs import complete_id, load_live

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
        int | None, Option("--tail", metavar="NUMBER", min=0, max=10**9, help="Start with the last lines.")
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
    silent = [job for job in meant if not (job.task.attempts or attempt) and (job.task.state.is_over or not follow)]
    for number, job in enumerate(job for job in meant if job not in silent):
        if len(meant) > 1:
            _print(f"{chr(10) if number else ''}==> {job.key} <==\n".encode())
        if attempt is not None and not OutputReader(job, attempt).is_there:
            raise Failure(f"job {job.key} has no output of an attempt {attempt}", REFUSED)
        reader = OutputReader(job, attempt or max(job.task.attempts, 1), tail)
        if follow:
            _follow(job, reader, is_last=attempt is None)
        else:
            reader.print_new()
    for state in dict.fromkeys(job.task.state for job in silent):
        keys = [job.key for job in silent if job.task.state is state]
        say_of_jobs(keys, f"has not run: it is {state}", f"have not run: they are {state}", complain)
    return 0


class OutputReader:
    """Prints the output of one attempt as it grows, from its last lines on if `tail` is given. A bounded one has two files, the
    older one beside it.
    """

    def __init__(self, job: Job, attempt: int, tail: int | None = None) -> None:
        self.attempt = attempt
        self.path = job.record.log_of(job.key.index, attempt)
        self._old = self.path.with_name(f"{self.path.name}.old")
        self._tail = tail
        self._file: BufferedReader | None = None

    @property
    def is_there(self) -> bool:
        return self.path.exists() or self._old.exists()

    def print_new(self) -> None:
        """Print what has been written since the last time."""
        blocks: Iterable[Sequence[bytes]] = self._read()
        if self._tail is not None:
            blocks, self._tail = [[*deque(chain.from_iterable(blocks), self._tail)]], None
        for lines in blocks:
            _print(b"".join(lines))

    def _read(self) -> Iterator[list[bytes]]:
        if self._file is None and self._old.exists():
            self._file = self._old.open("rb")
        while True:
            try:
                if self._file is None:
                    self._file = self.path.open("rb")
                while lines := self._file.readlines(_READ_BYTES):
                    yield lines
                if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                    return
            except FileNotFoundError:
                return
            self._file.close()  # it has become the older one
            self._file = None


def _follow(job: Job, reader: OutputReader, *, is_last: bool) -> None:
    """Print the output as it comes, and that of the next attempt where the job is run again, if the last one is meant. Of the
    journal only what is new is read.
    """
    record, index, is_told = job.record, job.key.index, False
    while True:
        # The state is read before the output: what is written after that is read in the next round.
        record.refresh()
        task = record.submission.shown(index)
        reader.print_new()
        if task.attempts > reader.attempt and is_last:
            following = OutputReader(job, reader.attempt + 1)
            if following.path == reader.path:  # those of a batch share a log
                reader.attempt += 1
            else:
                reader = following
            continue
        if task.state.is_over or task.attempts > reader.attempt:
            if task.attempts == 0:
                complain(f"job {job.key} has not run: it is {task.state}")
            return
        if task.attempts < reader.attempt and not is_told:
            complain(f"job {job.key} is {task.state}; waiting for it")
            is_told = True
        time.sleep(_LOOK_S)


def _print(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
