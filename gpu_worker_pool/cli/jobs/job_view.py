"""Jobs as commands show them: in tables, as JSON, and in sentences."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpu_worker_pool.cli.output import Text, plain
from gpu_worker_pool.cli.table import Table, make_table
from gpu_worker_pool.cli.units import show_duration, show_memory, show_moment
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.jobs.job_key import JobKey, parse_key
from gpu_worker_pool.jobs.job_store import JobRecord
from gpu_worker_pool.jobs.life import JobLife, JobState, RunFacts, Usage
from gpu_worker_pool.jobs.plan import what_holds

_WHOLE: Final = ("ID", "OWNER", "STATE", "GPU", "SINCE", "STARTED", "TIME", "TRY", "MEMORY", "UTIL")
_COLOURS: Final = {
    JobState.RUNNING: "green",
    JobState.WAITING: "yellow",
    JobState.FAILED: "red",
    JobState.INTERRUPTED: "red",
    JobState.CANCELLED: "dim",
    JobState.SKIPPED: "dim",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A task of a submission, as it is shown."""

    record: JobRecord
    life: JobLife

    @property
    def key(self) -> JobKey:
        return self.life.key

    @property
    def run(self) -> RunFacts | None:
        """The supervisor of its last run."""
        return self.record.submission.runs.get(self.life.run or "")

    @property
    def usage(self) -> Usage:
        return self.record.submission.usage.get(self.life.run or "") or Usage()

    @property
    def state_text(self) -> str:
        """Its state; `unreadable` where it runs, and only its journal says so."""
        is_unreadable = self.record.trouble is not None and not self.life.state.is_over
        return "unreadable" if is_unreadable else str(self.life.state)

    @property
    def command_text(self) -> str:
        """Its name if it has one, else the words of its command as one would type them."""
        spec = self.record.spec
        if spec.batch is not None:
            return plain(spec.command_of(self.key.index)[-1])
        return plain(spec.name or shlex.join(spec.command_of(self.key.index)))

    @property
    def how_ended(self) -> str:
        life = self.life
        code = "" if life.exit_code in (None, 0) else f"exit code {life.exit_code}"
        return plain("; ".join(filter(None, (code, life.why or ""))))


def jobs_of(records: Iterable[JobRecord]) -> Iterable[Job]:
    return (Job(record, life) for record in records for life in record.submission.lives())


def parse_ids(ids: Sequence[str]) -> list[JobKey]:
    try:
        return [parse_key(text) for text in ids]
    except ValueError as error:
        raise Failure(str(error), USAGE) from None


def find_jobs(records: Mapping[int, JobRecord], ids: Sequence[str]) -> list[Job]:
    """The jobs of these ids, of an array all its tasks. Failure where one is not an id, or not that of a job."""
    found: dict[JobKey, Job] = {}
    for wanted in parse_ids(ids):
        record = records.get(wanted.number)
        if record is None or not (wanted.index is None or record.submission.has(wanted.index)):
            raise Failure(
                f"there is no job {wanted}; `gpu-pool jobs` and `gpu-pool history` list those there are", REFUSED
            )
        submission = record.submission
        lives = submission.lives() if wanted.index is None else [submission.life(wanted.index)]
        found |= {life.key: Job(record, life) for life in lives}
    return list(found.values())


def say_of_jobs(keys: Iterable[JobKey], of_one: str, of_tasks: str, say: Callable[[str], object]) -> None:
    """Say the same of each of these jobs, and once of all tasks of an array: `job 3 ...`, `9998 tasks of job 5 ...`."""
    tasks: dict[int, list[JobKey]] = {}
    for key in keys:
        tasks.setdefault(key.number, []).append(key)
    for number, found in tasks.items():
        say(f"job {found[0]} {of_one}" if len(found) == 1 else f"{len(found)} tasks of job {number} {of_tasks}")


def job_json(job: Job, waiting: Mapping[str, Any] | None = None) -> dict[str, Any]:
    record, life, spec, run, usage = job.record, job.life, job.record.spec, job.run, job.usage
    wait = waiting or {}
    is_waiting = life.state is JobState.WAITING
    return {
        "id": str(life.key),
        "name": spec.name,
        "state": job.state_text,
        "command": spec.command_of(life.key.index),
        "directory": spec.cwd,
        "gpus_wanted": spec.gpus,
        "priority": spec.priority,
        "after": list(spec.after),
        "submitted_at": iso_time(spec.submitted_at),
        "started_at": iso_time(life.started_at),
        "ended_at": iso_time(life.ended_at),
        "attempts": life.attempts,
        "gpus": [] if run is None else list(run.gpus),
        "lease_id": wait.get("lease_id") if run is None or is_waiting else run.lease_id,
        "exit_code": life.exit_code,
        "why": record.trouble or life.why,
        "end_reason": life.end_reason,
        "peak_memory_mb": usage.peak_memory_mb,
        "peak_utilization_percent": usage.peak_utilization_percent,
        "mean_utilization_percent": usage.mean_utilization_percent,
        "position": wait.get("position"),
        "reason": wait.get("reason"),
        "expected_start_at": wait.get("expected_start_at"),
        "folder": str(record.folder),
        "log": str(record.log_of(life.key.index, life.attempts)) if life.attempts else None,
    }


def live_table(
    jobs: Iterable[Job], records: Mapping[int, JobRecord], waiting: Mapping[int, Mapping[str, Any]], *, is_each: bool
) -> Table:
    """What waits and runs: since when, on what, and why not yet. Unless `is_each`, tasks of one array that do not run and
    are in the same state share a row.
    """
    now = time.time()
    table = make_table("ID", "STATE", "GPU", "SINCE", "TRY", "NOTES", "COMMAND", whole=_WHOLE)
    for group in [[job] for job in jobs] if is_each else _groups(jobs):
        job, life, run = group[0], group[0].life, group[0].run
        has_gpus = run is not None and (life.state is JobState.RUNNING or life.state.is_over)
        gpus = ", ".join(map(str, run.gpus)) if run is not None and has_gpus else f"wants {job.record.spec.gpus}"
        notes = _notes(job, waiting.get(job.key.number, {}), records)
        spec = job.record.spec
        is_unreadable = job.state_text != life.state
        table.add_row(
            str(group[0].key) if len(group) == 1 else f"{group[0].key}..{group[-1].key.index}",
            Text(job.state_text, style="red" if is_unreadable else _COLOURS.get(life.state, "")),
            gpus or "-",
            _since(job, now),
            str(life.attempts or "-"),
            _line("; ".join(filter(None, (f"{len(group)} tasks" if len(group) > 1 else "", notes)))),
            _line(job.command_text if len(group) == 1 else plain(spec.name or shlex.join(spec.command))),
        )
    return table


def _line(text: str) -> Text:
    """A long text, which is cut on a terminal that has no room for it: each job has one line."""
    return Text(text, is_line=True)


def _groups(jobs: Iterable[Job]) -> list[list[Job]]:
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        is_alone = job.key.index is None or job.life.state is JobState.RUNNING
        key = job.key if is_alone else (job.key.number, job.life.state, job.life.attempts)
        groups.setdefault(key, []).append(job)
    return list(groups.values())


def _since(job: Job, now: float) -> str:
    life = job.life
    at = life.started_at if life.state is JobState.RUNNING else life.ended_at if life.state.is_over else None
    return show_moment(job.record.spec.submitted_at if at is None else at, now)


def _notes(job: Job, wait: Mapping[str, Any], records: Mapping[int, JobRecord]) -> str:
    life, record = job.life, job.record
    if record.trouble is not None:
        return plain(f"its files cannot be read: {record.trouble}")
    if life.state.is_over:
        return job.how_ended
    if life.state is JobState.RUNNING:
        return "is being cancelled" if life.is_cancel_asked else ""
    hold = what_holds(record.submission, {number: other.submission for number, other in records.items()})
    return f"after {hold.after}" if hold is not None else plain(wait.get("reason") or "")


def past_table() -> Table:
    """The table of the history, without rows."""
    headings = ("ID", "OWNER", "STATE", "GPU", "STARTED", "TIME", "MEMORY", "UTIL", "HOW", "COMMAND")
    return make_table(*headings, whole=_WHOLE)


def past_row(job: Job, owner: str, now: float) -> list[Text]:
    """A job that is over, for the table of the history."""
    life, usage = job.life, job.usage
    ran = life.started_at is not None and life.ended_at is not None
    took = show_duration(max((life.ended_at or 0.0) - (life.started_at or 0.0), 0.0)) if ran else "-"
    memory, mean = usage.peak_memory_mb, usage.mean_utilization_percent
    gpus = ", ".join(map(str, job.run.gpus)) if job.run is not None and ran else ""
    return [
        Text(str(job.key)),
        Text(owner),
        Text(life.state, style=_COLOURS.get(life.state, "")),
        Text(gpus or "-"),
        Text(show_moment(life.started_at if ran else life.ended_at, now)),
        Text(took),
        Text("-" if memory is None else show_memory(memory)),
        Text("-" if mean is None else f"{mean:.0f}%"),
        _line(job.how_ended),
        _line(job.command_text),
    ]
