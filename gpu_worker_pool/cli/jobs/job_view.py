"""Jobs as commands show them: in tables, as JSON, and in sentences."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpu_worker_pool.cli.output import Text, plain
from gpu_worker_pool.cli.pools.report import LeaseReport, short_start, show_terms
from gpu_worker_pool.cli.table import Table, make_table
from gpu_worker_pool.cli.units import show_duration, show_memory, show_moment
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.jobs.job_record import JobRecord
from gpu_worker_pool.jobs.job_spec import JobKey, parse_key
from gpu_worker_pool.jobs.submission import BEGIN, JobState, JobTask, Run, Usage, what_holds

from .own_leases import RequestWait

_WHOLE: Final = ("ID", "OWNER", "STATE", "GPU", "SINCE", "STARTS", "STARTED", "TIME", "MEMORY", "UTIL")
_OF_LEASES: Final = {"queued": JobState.WAITING, "active": JobState.RUNNING}
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
    task: JobTask

    @property
    def key(self) -> JobKey:
        return JobKey(self.record.number, self.task.index)

    @property
    def run(self) -> Run | None:
        """The supervisor of its last run."""
        return self.record.submission.runs.get(self.task.run or "")

    @property
    def usage(self) -> Usage:
        return (None if self.run is None else self.run.usage) or Usage()

    @property
    def state_text(self) -> str:
        """Its state; `unreadable` where it runs, and only its journal says so."""
        is_unreadable = self.record.trouble is not None and not self.task.state.is_over
        return "unreadable" if is_unreadable else str(self.task.state)

    @property
    def command_text(self) -> str:
        """Its name if it has one, else the words of its command as one would type them."""
        spec = self.record.spec
        if spec.batch is not None:
            return plain(spec.command_of(self.key.index)[-1])
        return plain(spec.name or shlex.join(spec.command_of(self.key.index)))

    @property
    def how_ended(self) -> str:
        task = self.task
        code = "" if task.exit_code in (None, 0) else f"exit code {task.exit_code}"
        return plain("; ".join(filter(None, (code, task.why or ""))))


def jobs_of(records: Iterable[JobRecord]) -> Iterable[Job]:
    return (Job(record, task) for record in records for task in record.submission.tasks())


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
            raise Failure(f"there is no job {wanted}; `gpu-pool jobs` and `gpu-pool history` list yours", REFUSED)
        submission = record.submission
        tasks = submission.tasks() if wanted.index is None else [submission.shown(wanted.index)]
        found |= {(job := Job(record, task)).key: job for task in tasks}
    return list(found.values())


def say_of_jobs(keys: Iterable[JobKey], of_one: str, of_tasks: str, say: Callable[[str], object]) -> None:
    """Say the same of each of these jobs, and once of all tasks of an array: `job 3 ...`, `9998 tasks of job 5 ...`."""
    tasks: dict[int, list[JobKey]] = {}
    for key in keys:
        tasks.setdefault(key.number, []).append(key)
    for number, found in tasks.items():
        say(f"job {found[0]} {of_one}" if len(found) == 1 else f"{len(found)} tasks of job {number} {of_tasks}")


def job_json(job: Job, waiting: RequestWait = RequestWait()) -> dict[str, Any]:  # noqa: B008 - it cannot be changed
    record, task, spec, run, usage = job.record, job.task, job.record.spec, job.run, job.usage
    lease, is_waiting = waiting.lease, task.state is JobState.WAITING
    view = None if lease is None else lease.view
    return {
        "id": str(job.key),
        "name": spec.name,
        "state": job.state_text,
        "command": spec.command_of(job.key.index),
        "directory": spec.cwd,
        "gpus_wanted": spec.gpus,
        "priority": spec.priority,
        "after": list(spec.after),
        "submitted_at": iso_time(spec.submitted_at),
        "started_at": iso_time(task.started_at),
        "ended_at": iso_time(task.ended_at),
        "attempts": task.attempts,
        "gpus": [] if run is None else list(run.gpus),
        "lease_id": (None if view is None else view.id) if run is None or is_waiting else run.lease_id,
        "exit_code": task.exit_code,
        "why": record.trouble or task.why,
        "end_reason": task.end_reason,
        "peak_memory_mb": usage.peak_memory_mb,
        "peak_utilization_percent": usage.peak_utilization_percent,
        "mean_utilization_percent": usage.mean_utilization_percent,
        "position": None if view is None else view.position,
        "reason": waiting.trouble if view is None else view.reason,
        "expected_start_at": None if view is None else view.expected_start_at,
        "folder": str(record.folder),
        "log": str(record.log_of(job.key.index, task.attempts)) if task.attempts else None,
    }


def wait_of(job: Job, waiting: Mapping[int, RequestWait]) -> RequestWait:
    """How a job waits. A task that runs waits for nothing, though others of its array do."""
    return RequestWait() if job.task.state is JobState.RUNNING else waiting.get(job.key.number, RequestWait())


def live_table(
    jobs: Iterable[Job],
    leases: Sequence[LeaseReport],
    names: Mapping[str, str],
    records: Mapping[int, JobRecord],
    waiting: Mapping[int, RequestWait],
    *,
    is_each: bool,
    has_owners: bool,
) -> Table:
    """What waits and runs: since when, on what, when it will start, and why not yet. Unless `is_each`, tasks of one array that
    do not run and are in the same state share a row. `leases` are not those of jobs, and have these `names`.
    """
    now, own = time.time(), user_name()
    owner = ["OWNER"] if has_owners else []
    table = make_table("ID", "STATE", *owner, "GPU", "SINCE", "STARTS", "NOTES", "COMMAND", whole=_WHOLE)
    for group in [[job] for job in jobs] if is_each else _groups(jobs):
        first, wait = group[0], wait_of(group[0], waiting)
        tasks = [f"{len(group)} tasks"] if len(group) > 1 else []
        spec, is_unreadable = first.record.spec, first.state_text != first.task.state
        table.add_row(
            str(first.key) if len(group) == 1 else f"{first.key}..{group[-1].key.index}",
            Text(first.state_text, style="red" if is_unreadable else _COLOURS.get(first.task.state, "")),
            *([own] if has_owners else []),
            _gpus_of(first),
            _since(first, now),
            "" if wait.lease is None else short_start(wait.lease.view, now),
            _line("; ".join([*tasks, *_notes(first, wait, records)])),
            _line(first.command_text if len(group) == 1 else plain(spec.name or shlex.join(spec.command))),
        )
    for lease in leases:
        view = lease.view
        state = _OF_LEASES.get(view.state, JobState.RUNNING)
        priority = [f"priority {view.priority}"] if view.priority else []
        table.add_row(
            names[lease.id],
            Text("draining" if view.state == "draining" else state, style=_COLOURS.get(state, "")),
            *([view.owner or "-"] if has_owners else []),
            ", ".join(lease.gpu_ids) or f"wants {view.wishes.gpus}",
            show_moment(lease.since_at, now),
            short_start(view, now),
            _line("; ".join(filter(None, [*priority, *show_terms(view, now), lease.why or ""]))),
            _line(lease.command or lease.holder),
        )
    return table


def _gpus_of(job: Job) -> str:
    run, state = job.run, job.task.state
    if run is not None and (state is JobState.RUNNING or state.is_over):
        return ", ".join(map(str, run.gpus)) or "-"
    return f"wants {job.record.spec.gpus}"


def _line(text: str) -> Text:
    """A long text, which is cut on a terminal that has no room for it: each job has one line."""
    return Text(text, is_line=True)


def _groups(jobs: Iterable[Job]) -> list[list[Job]]:
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        is_alone = job.key.index is None or job.task.state is JobState.RUNNING
        key = job.key if is_alone else (job.key.number, job.task.state, job.task.attempts)
        groups.setdefault(key, []).append(job)
    return list(groups.values())


def _since(job: Job, now: float) -> str:
    task = job.task
    at = task.started_at if task.state is JobState.RUNNING else task.ended_at if task.state.is_over else None
    return show_moment(job.record.spec.submitted_at if at is None else at, now)


def _notes(job: Job, wait: RequestWait, records: Mapping[int, JobRecord]) -> list[str]:
    task, record = job.task, job.record
    if record.trouble is not None:
        return [plain(f"its files cannot be read: {record.trouble}")]
    said = [f"attempt {task.attempts}"] if task.attempts > 1 else []
    if task.state.is_over:
        said.append(job.how_ended)
    elif task.state is JobState.RUNNING:
        said += ["requests its GPUs itself: see the leases below"] if record.spec.runs_itself else []
        said += ["is being cancelled"] if task.is_cancel_asked else []
    elif (hold := _hold(record, records)) is not None:
        said.append(hold)
    else:
        said.append(plain(wait.trouble or "") if wait.lease is None else wait.lease.why or "")
    return list(filter(None, said))


def _hold(record: JobRecord, records: Mapping[int, JobRecord]) -> str | None:
    submission, now = record.submission, time.time()
    hold = what_holds(submission, {number: one.submission for number, one in records.items()}, now)
    if hold is not None and hold.waits_for == BEGIN:
        return f"begins {show_moment(record.spec.begin_at, now)}"
    return None if hold is None else hold.waits_for


def past_table() -> Table:
    """The table of the history, without rows."""
    headings = ("ID", "OWNER", "STATE", "GPU", "STARTED", "TIME", "MEMORY", "UTIL", "HOW", "COMMAND")
    return make_table(*headings, whole=_WHOLE)


def past_row(job: Job, owner: str, now: float) -> list[Text]:
    """A job that is over, for the table of the history."""
    task, usage = job.task, job.usage
    ran = task.started_at is not None and task.ended_at is not None
    took = show_duration(max((task.ended_at or 0.0) - (task.started_at or 0.0), 0.0)) if ran else "-"
    memory, mean = usage.peak_memory_mb, usage.mean_utilization_percent
    gpus = ", ".join(map(str, job.run.gpus)) if job.run is not None and ran else ""
    return [
        Text(str(job.key)),
        Text(owner),
        Text(task.state, style=_COLOURS.get(task.state, "")),
        Text(gpus or "-"),
        Text(show_moment(task.started_at if ran else task.ended_at, now)),
        Text(took),
        Text("-" if memory is None else show_memory(memory)),
        Text("-" if mean is None else f"{mean:.0f}%"),
        _line(job.how_ended),
        _line(job.command_text),
    ]
