"""`gpu-pool jobs`: what waits and runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from gpu_worker_pool.cli.declare import Argument
from gpu_worker_pool.cli.options import Json
from gpu_worker_pool.cli.output import complain, out, plain, print_json
from gpu_worker_pool.cli.table import print_table
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.failure import Failure

if TYPE_CHECKING:
    from gpu_worker_pool.jobs.job_store import JobRecord, JobStore


def complete_id(incomplete: str) -> list[str]:
    """For completion: ids of jobs, the latest first."""
    return [str(number) for number in reversed(own_store().numbers()) if str(number).startswith(incomplete)]


JobId = Annotated[
    str, Argument(metavar="ID", help="The job: 12, or 12_3 for a task of an array.", complete=complete_id)
]
JobIds = Annotated[
    list[str] | None,
    Argument(
        metavar="[ID]...",
        help="Jobs by their ids: 12, or 12_3 for a task of an array.",
        complete=complete_id,
    ),
]


def own_store() -> JobStore:
    from gpu_worker_pool.jobs.job_store import JobStore, jobs_folder  # noqa: PLC0415 - only where it is needed

    return JobStore(jobs_folder(os.environ))


def jobs(ids: JobIds = None, *, json: Json = False) -> None:
    """Show your jobs on this box: what waits, with its queue position and why, and what runs.

    Tasks of an array that wait share a line. With ids, each of those jobs is shown, also if it is over. If a job waits or
    runs and the keeper is gone, this starts it again. `gpu-pool history` shows what is over.
    """
    from .job_view import find_jobs, job_json, jobs_of, live_table, parse_ids  # noqa: PLC0415 - only where it is needed

    store = own_store()
    wanted = {key.number for key in parse_ids(ids or ())}
    records = load_live(store, wanted)
    waiting = _ask_servers(store, records.values())
    live = [job for job in jobs_of(records.values()) if not job.life.state.is_over]
    shown = find_jobs(records, ids) if ids else live
    if json:
        print_json("jobs", {"jobs": [job_json(job, waiting.get(job.key.number)) for job in shown]})
        return
    if not shown:
        over = len(store.numbers()) - len({job.key.number for job in live})
        complain("no job waits or runs" + (f"; {count(over, 'job')} over: gpu-pool history" if over else ""))
        return
    print_table(out(), live_table(shown, records, waiting, is_each=bool(ids)))


def load_live(store: JobStore, others: Iterable[int] = ()) -> dict[int, JobRecord]:
    """What is not over, what it comes after, and these others. The keeper is started if there are jobs for it; where that
    fails, what the files say is shown.
    """
    from gpu_worker_pool.jobs.keeper_link import wake_keeper  # noqa: PLC0415 - loads much

    records = store.load(store.live_numbers())
    if any(not record.submission.is_over or record.submission.open_runs for record in records.values()):
        try:
            wake_keeper(store)
        except Failure as failure:
            complain(str(failure))
        for record in records.values():
            record.refresh()
    before = {key.number for record in records.values() for key in record.submission.terms.after}
    missing = {*others, *before} - records.keys()
    return dict(sorted((records | store.load(sorted(missing))).items()))


def _ask_servers(store: JobStore, records: Iterable[JobRecord]) -> Mapping[int, dict[str, Any]]:
    """How each request waits, as its server says it, by submission."""
    from gpu_worker_pool.cli.pools.servers import Servers  # noqa: PLC0415 - only where it is needed
    from gpu_worker_pool.wire.leases import LeaseList, LeaseView  # noqa: PLC0415
    from gpu_worker_pool.wire.reader import read  # noqa: PLC0415

    found: dict[int, dict[str, Any]] = {}
    answers: dict[object, tuple[dict[str, LeaseView], str | None]] = {}
    for record in records:
        if record.submission.requested_at is None:
            continue
        try:
            environ = store.environment_of(record.number)
            servers = Servers(record.spec.endpoints, environ=environ)
        except Failure as failure:
            found[record.number] = {"reason": str(failure)}
            continue
        key = repr((servers.config, sorted(servers.config.tokens.items())))
        if key not in answers:
            replies = servers.run(lambda servers: servers.ask_all("/leases"))
            lists = [read(LeaseList, reply.data, clean=plain) for reply in replies if reply.is_ok]
            silent = "; ".join(
                f"{reply.endpoint} ({reply.url}): {reply.why_not}" for reply in replies if not reply.is_ok
            )
            who = "no server answers" if not lists else "not all servers answer"
            leases = [lease for one in lists if one is not None for lease in one.leases if lease.state == "queued"]
            by_worker = {lease.worker_id or "": lease for lease in leases}
            answers[key] = by_worker, f"{who}: {silent}" if silent else None
        by_worker, trouble = answers[key]
        lease = by_worker.get(record.submission.requested_by)
        found[record.number] = {
            "lease_id": None if lease is None else lease.id,
            "position": None if lease is None else lease.position,
            "reason": trouble if lease is None else lease.reason,
            "expected_start_at": None if lease is None else lease.expected_start_at,
        }
    return found
