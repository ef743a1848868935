"""The state file of a batch: the attempts so far, so that a later run continues from there.

The file has one JSON object a line and is only appended to. A crash can cut only the last line short, and that line is
left out.

The guards of the jobs hold the lock of the file too: it lasts until the last job of a batch that was killed is gone, and
no job runs twice at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.output import complain
from gpu_worker_pool.cli.run.attempt import Outcome
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.host.clock import boot_id, boot_time
from gpu_worker_pool.host.identity import Machine, own_proc, pid_namespace
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.wire.reader import read, read_time

from .jobs import PREEMPTED, Job

# How long guards without a job may take to end after their batch was killed.
_GUARDS_END_S: Final = 2.0
_LOOK_AGAIN_S: Final = 0.05
HEADER = json.dumps({"schema": "gpu-pool/batch-state/1"})


@dataclass(frozen=True, slots=True)
class JobStart:
    """The start of a job, with the processes that had to do with it: the batch, and the guard of the job."""

    key: str
    line: int
    guard: ProcessId
    batch: ProcessId


def last_starts(records: Iterable[Mapping[str, Any]], boot_id: str, pid_namespace: str | None) -> list[JobStart]:
    """The jobs that the last batch in the file started and did not finish; none where it ran elsewhere."""
    found: dict[str, JobStart] = {}
    for record in records:
        facts = read(_StartFacts, record)
        if facts is None:
            found.pop(str(record.get("job")), None)  # an outcome
        elif (facts.boot_id, facts.pid_namespace) == (boot_id, pid_namespace):
            batch = ProcessId(facts.batch_pid, facts.batch_started)
            found = {key: start for key, start in found.items() if start.batch == batch}
            found[facts.job] = JobStart(facts.job, facts.line, ProcessId(facts.guard_pid, facts.guard_started), batch)
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _StartFacts:
    """The record of a start, as it is in the file."""

    job: str
    line: int
    guard_pid: int
    guard_started: float | None
    batch_pid: int
    batch_started: float | None
    boot_id: str
    pid_namespace: str | None


class StateFile:
    """A state file, open and locked. Failure where another batch has it open, or where it is another kind of file."""

    def __init__(self, path: Path, *, is_fresh: bool) -> None:
        self._path = path
        self._is_fresh = is_fresh
        self._descriptor = -1
        # How often each job was preempted in earlier runs, by key; after `load`.
        self.preemptions: Counter[str] = Counter()

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
            self._lock()
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def descriptor(self) -> int:
        """For the guards of the jobs, which keep it open, and the file locked."""
        return self._descriptor

    def _lock(self) -> None:
        """Lock the file, once the jobs of a batch that was killed are gone. Failure where another batch works with it."""
        machine, told, give_up_at = Machine.here(), set[str](), boot_time() + _GUARDS_END_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass
            else:
                return
            starts = self._last_starts(machine)
            is_batch_alive = any(machine.is_alive(start.batch) for start in starts)
            left = [start for start in starts if not is_batch_alive and machine.is_alive(start.guard)]
            for start in left:
                if start.key not in told:
                    told.add(start.key)
                    complain(
                        f"job {start.line} still runs (pid {start.guard.pid}) under the batch that was killed; waiting for it"
                    )
            if is_batch_alive or (not left and boot_time() >= give_up_at):
                raise Failure(
                    f"another gpu-pool batch works with {self._path}; wait for it, or name another with --state"
                )
            time.sleep(_LOOK_AGAIN_S)

    def load(self) -> dict[str, Outcome]:
        """The outcomes of the jobs that were done, by key; none where the file is to be fresh, which empties it."""
        records = self._records()  # read also then, so that only a state file is ever emptied
        if self._is_fresh:
            os.ftruncate(self._descriptor, 0)
            records = []
        if not records:
            self._append(json.loads(HEADER))
        done: dict[str, Outcome] = {}
        self.preemptions = Counter(record["job"] for record in records[1:] if record.get("end_reason") == PREEMPTED)
        for record in records[1:]:
            if record.get("exit_code") == 0:
                started_at, ended_at = (read_time(str(record.get(name))) for name in ("started_at", "ended_at"))
                gpus = tuple(record.get("gpus") or ())
                done[record["job"]] = Outcome(0, record.get("why"), gpus, started_at, ended_at, record.get("log"))
        return done

    def note_start(self, job: Job, guard_pid: int) -> None:
        """Append that a job is about to start. It need not be on the disk: it matters only while the guard lives."""
        proc = own_proc()
        started = ProcessTable(proc).started if proc else lambda _: None
        facts = _StartFacts(
            job=job.key,
            line=job.line,
            guard_pid=guard_pid,
            guard_started=started(guard_pid),
            batch_pid=os.getpid(),
            batch_started=started(os.getpid()),
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
        )
        self._append(asdict(facts), is_synced=False)

    def note(self, job: Job, attempt: int, outcome: Outcome) -> None:
        """Append an attempt. It is on the disk when this returns."""
        about = {"job": job.key, "line": job.line, "command": job.command, "attempt": attempt}
        self._append({**about, **outcome.as_json()})

    def _last_starts(self, machine: Machine) -> list[JobStart]:
        """What the file says while others write to it: a line that is not whole yet is left out."""
        records = []
        for line in os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
        found = [record for record in records if isinstance(record, dict)]
        return last_starts(found, machine.boot_id, machine.pid_namespace)

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

    def _append(self, record: dict[str, Any], *, is_synced: bool = True) -> None:
        data = json.dumps(record).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            if is_synced:
                os.fsync(self._descriptor)
        except OSError as error:
            raise Failure(
                f"the state file {self._path} cannot be written: {error.strerror}; "
                "fix that, then run the same command again"
            ) from None
