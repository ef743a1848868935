"""`gpu-pool jobs`: all that a user runs and waits for, however it was started."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import complain, out, print_json
from gpu_worker_pool.cli.pools.report import short_ids
from gpu_worker_pool.cli.table import print_table
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.jobs.job_record import JobRecord
from gpu_worker_pool.jobs.job_store import JobStore, own_store
from gpu_worker_pool.jobs.keeper_process import wake_keeper

from .job_view import find_jobs, job_json, jobs_of, live_table, parse_ids, wait_of
from .own_leases import beside_jobs, see_leases, waits_of


def complete_id(incomplete: str) -> list[tuple[str, str]]:
    """For completion: ids of jobs, the latest first."""
    return [(str(number), "") for number in reversed(own_store().numbers()) if str(number).startswith(incomplete)]


JobIds = Annotated[
    list[str] | None,
    Argument(
        metavar="[ID]...",
        help="Jobs by their ids: 12, or 12_3 for a task of an array.",
        complete=complete_id,
    ),
]


def jobs(
    ids: JobIds = None,
    *,
    everyone: Annotated[bool, Option("--all", help="Also those of all other users.")] = False,
    endpoint: Endpoints = None,
    json: Json = False,
) -> None:
    """List what you run and what waits, when it will probably start, and why not yet.

    Jobs that you submitted have numbers. Everything else that holds or wants a GPU of the servers (`run`, Python) has the id
    of its lease. `cancel` and `explain` take both. Tasks of an array that wait share a line. With ids, each of those jobs is
    shown, even if it is over. `gpu-pool history` lists what is over.
    """
    store = own_store()
    wanted = {key.number for key in parse_ids(ids or ())}
    records = load_live(store, wanted)
    seen = see_leases(endpoint)
    waiting = waits_of(store, records.values(), seen)
    live = [job for job in jobs_of(records.values()) if not job.task.state.is_over]
    shown = find_jobs(records, ids) if ids else live
    rest = (
        [] if ids else [each for each in beside_jobs(seen.leases, records.values()) if everyone or seen.is_mine(each)]
    )
    if not ids:
        for trouble in seen.troubles:
            complain(trouble)
    if json:
        found = [job_json(job, wait_of(job, waiting)) for job in shown]
        print_json("jobs", {"jobs": found, "leases": [{"endpoint": lease.endpoint, **lease.body} for lease in rest]})
        return
    if not shown and not rest:
        complain(
            "nobody has anything running or waiting"
            if everyone
            else "you have nothing running or waiting; `gpu-pool history` shows what has ended"
        )
        return
    names = short_ids([lease.id for lease in seen.leases])
    print_table(out(), live_table(shown, rest, names, records, waiting, is_each=bool(ids), has_owners=everyone))


def load_live(store: JobStore, others: Iterable[int] = ()) -> dict[int, JobRecord]:
    """What is not over, what it comes after, and these others. The keeper is started if there are jobs for it; where that
    fails, what the files say is shown.
    """
    records = store.load(store.live_numbers())
    if any(not record.submission.is_over or record.submission.open_runs for record in records.values()):
        try:
            wake_keeper(store)
        except Failure as failure:
            complain(str(failure))
        for record in records.values():
            record.refresh()
    before = {key.number for record in records.values() for key in record.spec.after_keys}
    missing = {*others, *before} - records.keys()
    return dict(sorted((records | store.load(sorted(missing))).items()))
