"""Jobs as tables and as JSON."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from gpu_worker_pool.cli.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.cli.output import Text, plain
from gpu_worker_pool.cli.table import Table, make_table
from gpu_worker_pool.cli.units import show_duration, show_memory, show_moment
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.jobs.job_key import JobKey, parse_key
from gpu_worker_pool.jobs.life import JobLife, JobState
from gpu_worker_pool.jobs.plan import why_not_yet

from .job_store import JobRecord

_WHOLE: Final = ("ID", "OWNER", "STATE", "GPU", "SINCE", "STARTED", "TIME", "TRY", "MEMORY", "UTIL")
_COLOURS: Final = {
    JobState.RUNNING: "green",
    JobState.WAITING: "yellow",
    JobState.FAILED: "red",
    JobState.INTERRUPTED: "red",
    JobState.CANCELLED: "dim",
    JobState.SKIPPED: "dim",
}


def find_jobs(records: Mapping[JobKey, JobRecord], ids: Sequence[str]) -> list[JobRecord]:
    """The jobs of these ids, of an array all its tasks. Failure where one is not an id, or not that of a job."""
    found: dict[JobKey, JobRecord] = {}
    for text in ids:
        try:
            wanted = parse_key(text)
        except ValueError as error:
            raise Failure(str(error), USAGE) from None
        meant = {key: record for key, record in records.items() if wanted.includes(key)}
        if not meant:
            raise Failure(
                f"there is no job {wanted}; `gpu-pool jobs` and `gpu-pool history` list those there are", REFUSED
            )
        found |= meant
    return list(found.values())


def say_of_jobs(keys: Sequence[str], of_one: str, of_tasks: str, say: Callable[[str], object]) -> None:
    """Say the same of each of these jobs, and once of all tasks of an array: `job 3 ...`, `9998 tasks of job 5 ...`."""
    tasks: dict[str, list[str]] = {}
    for key in keys:
        tasks.setdefault(key.partition("_")[0], []).append(key)
    for number, found in tasks.items():
        say(f"job {found[0]} {of_one}" if len(found) == 1 else f"{len(found)} tasks of job {number} {of_tasks}")


def command_text(record: JobRecord) -> str:
    """Its name if it has one, else the words of its command as one would type them."""
    return plain(record.spec.name or shlex.join(record.spec.command_of(record.key)))


def state_text(record: JobRecord) -> str:
    """Its state; `unreadable` where it runs, and only its journal says so."""
    return "unreadable" if record.is_unreadable else str(record.life.state)


def job_json(record: JobRecord, waiting: Mapping[str, Any] | None = None) -> dict[str, Any]:
    life, spec, usage, lease = record.life, record.spec, record.life.usage, record.life.lease
    wait = waiting or {}
    return {
        "id": str(record.key),
        "name": spec.name,
        "state": state_text(record),
        "command": spec.command_of(record.key),
        "directory": spec.cwd,
        "gpus_wanted": spec.gpus,
        "priority": spec.priority,
        "after": list(spec.after),
        "submitted_at": iso_time(spec.submitted_at),
        "started_at": iso_time(life.started_at),
        "ended_at": iso_time(life.ended_at),
        "attempts": life.attempts,
        "gpus": [] if lease is None else list(lease.gpus),
        "lease_id": wait.get("lease_id") if lease is None or life.state is JobState.WAITING else lease.id,
        "exit_code": life.exit_code,
        "why": record.trouble or life.why,
        "end_reason": life.end_reason,
        "peak_memory_mb": None if usage is None else usage.peak_memory_mb,
        "peak_utilization_percent": None if usage is None else usage.peak_utilization_percent,
        "mean_utilization_percent": None if usage is None else usage.mean_utilization_percent,
        "position": wait.get("position"),
        "reason": wait.get("reason"),
        "expected_start_at": wait.get("expected_start_at"),
        "folder": str(record.folder),
        "log": str(record.log) if life.attempts else None,
    }


def live_table(
    records: Sequence[JobRecord],
    everything: Iterable[JobRecord],
    waiting: Mapping[str, Mapping[str, Any]],
    *,
    is_each: bool,
) -> Table:
    """What waits and runs: since when, on what, and why not yet. Unless `is_each`, tasks of one array that do not run and
    are in the same state share a row.
    """
    now = time.time()
    tasks: dict[int, list[JobLife]] = {}
    for record in everything:
        tasks.setdefault(record.key.number, []).append(record.life)
    table = make_table("ID", "STATE", "GPU", "SINCE", "TRY", "NOTES", "COMMAND", whole=_WHOLE)
    for group in [[record] for record in records] if is_each else _groups(records):
        record, life = group[0], group[0].life
        lease = life.lease if life.state is JobState.RUNNING or life.state.is_over else None
        gpus = ", ".join(map(str, lease.gpus)) if lease else f"wants {record.spec.gpus}"
        notes = _notes(record, waiting.get(str(record.key), {}), tasks)
        table.add_row(
            _ids(group),
            Text(state_text(record), style="red" if record.is_unreadable else _COLOURS.get(life.state, "")),
            gpus or "-",
            _since(record, now),
            str(life.attempts or "-"),
            _line("; ".join(filter(None, (f"{len(group)} tasks" if len(group) > 1 else "", notes)))),
            _line(
                command_text(record) if len(group) == 1 else plain(record.spec.name or shlex.join(record.spec.command))
            ),
        )
    return table


def _line(text: str) -> Text:
    """A long text, which is cut on a terminal that has no room for it: each job has one line."""
    return Text(text)


def _groups(records: Sequence[JobRecord]) -> list[list[JobRecord]]:
    groups: dict[object, list[JobRecord]] = {}
    for record in records:
        is_alone = record.key.index is None or record.life.state is JobState.RUNNING
        key = record.key if is_alone else (record.key.number, record.life.state, record.life.attempts)
        groups.setdefault(key, []).append(record)
    return list(groups.values())


def _ids(group: Sequence[JobRecord]) -> str:
    first, last = group[0].key, group[-1].key
    return str(first) if first == last else f"{first}..{last.index}"


def _since(record: JobRecord, now: float) -> str:
    life = record.life
    at = life.started_at if life.state is JobState.RUNNING else life.ended_at if life.state.is_over else None
    return show_moment(record.spec.submitted_at if at is None else at, now)


def _notes(record: JobRecord, wait: Mapping[str, Any], tasks: Mapping[int, Sequence[JobLife]]) -> str:
    life = record.life
    if record.trouble is not None:
        return plain(f"its files cannot be read: {record.trouble}")
    if record.why_not_run is not None:
        return plain(record.why_not_run)
    if life.state.is_over:
        return how_ended(record)
    if life.state is JobState.RUNNING:
        return "is being cancelled" if life.is_cancel_asked else ""
    if life.state is JobState.SUBMITTED and isinstance(ids := why_not_yet(life, tasks), str):
        return f"after {ids}"
    return plain(wait.get("reason") or "")


def how_ended(record: JobRecord) -> str:
    life = record.life
    code = "" if life.exit_code in (None, 0) else f"exit code {life.exit_code}"
    return plain("; ".join(filter(None, (code, life.why or ""))))


def past_table() -> Table:
    """The table of the history, without rows."""
    headings = ("ID", "OWNER", "STATE", "GPU", "STARTED", "TIME", "MEMORY", "UTIL", "HOW", "COMMAND")
    return make_table(*headings, whole=_WHOLE)


def past_row(record: JobRecord, now: float) -> list[Text]:
    """A job that is over, for the table of the history, without its owner."""
    life, usage = record.life, record.life.usage
    ran = life.started_at is not None and life.ended_at is not None
    took = show_duration(max((life.ended_at or 0.0) - (life.started_at or 0.0), 0.0)) if ran else "-"
    memory = "-" if usage is None or usage.peak_memory_mb is None else show_memory(usage.peak_memory_mb)
    mean = None if usage is None else usage.mean_utilization_percent
    gpus = ", ".join(map(str, life.lease.gpus)) if life.lease is not None and ran else ""
    return [
        Text(str(record.key)),
        Text(life.state, style=_COLOURS.get(life.state, "")),
        Text(gpus or "-"),
        Text(show_moment(life.started_at if ran else life.ended_at, now)),
        Text(took),
        Text(memory),
        Text("-" if mean is None else f"{mean:.0f}%"),
        _line(how_ended(record)),
        _line(command_text(record)),
    ]
