"""`gpu-pool history`: jobs that are over, and who else used the GPUs."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Final

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import Text, complain, out, plain, print_json
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.table import print_table
from gpu_worker_pool.cli.units import parse_moment, show_duration, show_memory, show_moment
from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.jobs.job_store import own_store
from gpu_worker_pool.wire.accounting import FleetTimelineGpu, TimelineGpu, TimelineSpan, TimelineView
from gpu_worker_pool.wire.bounds import FEWEST_HOURS, MOST_HOURS
from gpu_worker_pool.wire.reader import read, read_time

from .job_view import job_json, jobs_of, past_row, past_table

DEFAULT_SINCE: Final = "7d"
_STATES: Final = {
    "revoked": "revoked", "time_limit": "stopped", "preempted": "stopped", "idle": "stopped", "expired": "lost", "holder_died": "lost",
}  # fmt: skip
_HOW: Final = {
    "revoked": "", "time_limit": "time limit", "expired": "no heartbeat came", "holder_died": "its process died",
}  # fmt: skip
STATE_COLOURS: Final = {"failed": "red", "lost": "red", "stopped": "yellow", "revoked": "yellow", "cancelled": "dim"}


@dataclass(frozen=True, slots=True)
class PastLease:
    """A lease that has ended and was not that of a job shown here, with its GPUs."""

    span: TimelineSpan
    gpus: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        span = self.span
        return {
            "lease_id": span.lease_id,
            "owner": span.owner,
            "command": span.label,
            "gpus": list(self.gpus),
            "started_at": iso_time(self.started_at),
            "ended_at": iso_time(self.ended_at),
            "end_reason": span.end_reason,
            "ended_by": span.ended_by,
            "end_note": span.end_note,
            "peak_memory_mb": span.peak_memory_mb,
            "mean_utilization_percent": span.mean_utilization_percent,
        }

    @property
    def started_at(self) -> float | None:
        return read_time(self.span.since)

    @property
    def ended_at(self) -> float | None:
        return read_time(self.span.until)

    @property
    def state(self) -> str:
        """In the words of the jobs. Its holder released it after a command that failed with a note of its exit code."""
        if self.span.end_reason == "released" and self.span.ended_by is None:
            return "failed" if self.span.end_note else "ended"
        return "cancelled" if self.span.end_reason == "released" else _STATES.get(self.span.end_reason or "", "ended")

    @property
    def how(self) -> str:
        """`exit code 2`, `by root: maintenance`, `time limit`."""
        said = (
            []
            if self.span.end_reason == "released"
            else [_HOW.get(self.span.end_reason or "", self.span.end_reason or "")]
        )
        said += [f"by {self.span.ended_by}"] if self.span.ended_by else []
        return ": ".join(filter(None, (" ".join(filter(None, said)), self.span.end_note)))

    def as_row(self, now: float) -> list[str | Text]:
        took = None if self.started_at is None or self.ended_at is None else self.ended_at - self.started_at
        return [
            "-",
            Text(self.span.owner or "-"),
            Text(self.state, style=STATE_COLOURS.get(self.state, "")),
            Text(", ".join(self.gpus)),
            show_moment(self.started_at, now),
            "-" if took is None else show_duration(took),
            "-" if self.span.peak_memory_mb is None else show_memory(self.span.peak_memory_mb),
            "-" if self.span.mean_utilization_percent is None else f"{self.span.mean_utilization_percent:.0f}%",
            Text(self.how, is_line=True),
            Text(self.span.label or "-", is_line=True),
        ]


def history(
    since: Annotated[
        str, Option(metavar="7d|2026-11-01", help="From when on: 7d (ago), or a date or time.")
    ] = DEFAULT_SINCE,
    *,
    mine: Annotated[bool, Option("--mine", help="Only jobs that you submitted; no server is asked.")] = False,
    json: Json = False,
    endpoint: Endpoints = None,
) -> None:
    """Show what is over: how it ended, on which GPU, and how much of it was used.

    Your submitted jobs come first, then all other leases that ended at the servers: of `run`, of Python, and of other users.
    Jobs are kept for 30 days (GPU_POOL_JOBS_KEEP).
    """
    now = time.time()
    since_at = parse_moment(since, now, "--since", is_past=True)
    if since_at > now:
        raise Failure(f"--since {since} is in the future; give a time that has passed", USAGE)
    records = own_store().load()
    over = [
        job
        for job in jobs_of(records.values())
        if job.task.state.is_over and (job.task.ended_at is None or job.task.ended_at >= since_at)
    ]
    over.sort(key=lambda job: (job.task.ended_at or 0.0, job.key.number, job.key.index or 0))
    known = {run.lease_id for record in records.values() for run in record.submission.runs.values()}
    leases = [] if mine else _ask(endpoint, since_at, known)
    if json:
        found = {"jobs": [job_json(job) for job in over], "leases": [lease.as_json() for lease in leases]}
        print_json("history", {"since": iso_time(since_at), **found})
        return
    if not over and not leases:
        complain(f"nothing has ended since {show_moment(since_at, now)}")
        return
    table, own = past_table(), user_name()
    for job in over:
        table.add_row(*past_row(job, own, now))
    for lease in leases:
        table.add_row(*lease.as_row(now))
    print_table(out(), table)


def _ask(endpoints: list[str] | None, since_at: float, known: Collection[str | None]) -> list[PastLease]:
    """The other leases that ended since then; a server that does not answer is named."""
    hours = min(max((time.time() - since_at) / 3600, FEWEST_HOURS), MOST_HOURS)
    answers = Servers(endpoints, is_fleet=True).run(lambda servers: servers.ask_all(f"/timeline?hours={hours:.4f}"))
    found: dict[str, PastLease] = {}
    for answer in answers:
        view = read(TimelineView, answer.data, clean=plain) if answer.is_ok else None
        if view is None:
            why = plain(answer.why_not) if answer.error else "it keeps no history"
            complain(f"{answer.endpoint} is left out: {why}")
            continue
        for gpu in view.gpus:
            for span in gpu.spans:
                if span.end_reason is None or span.lease_id in known:
                    continue
                before = found.get(span.lease_id)
                found[span.lease_id] = PastLease(span, (*(before.gpus if before else ()), _name_of(gpu)))
    return sorted(found.values(), key=lambda lease: lease.ended_at or 0.0)


def _name_of(gpu: TimelineGpu) -> str:
    """`2`, and `gpu-1:2` in a fleet."""
    local = str(gpu.uuid if gpu.gpu_id is None else gpu.gpu_id)
    return f"{gpu.node}:{local}" if isinstance(gpu, FleetTimelineGpu) and gpu.node else local
