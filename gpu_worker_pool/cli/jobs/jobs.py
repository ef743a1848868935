"""`gpu-pool jobs`: what waits and runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

from gpu_worker_pool.cli.declare import Argument
from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.options import Json
from gpu_worker_pool.cli.output import complain, out, print_json
from gpu_worker_pool.cli.table import print_table
from gpu_worker_pool.cli.units import count

if TYPE_CHECKING:
    from gpu_worker_pool.jobs.job_key import JobKey

    from .job_store import JobRecord, JobStore


def complete_id(incomplete: str) -> list[str]:
    """For completion: ids of jobs, the latest first."""
    from .job_store import JobStore, jobs_folder  # noqa: PLC0415

    store = JobStore(jobs_folder(os.environ))
    return [str(number) for number in reversed(store.numbers()) if str(number).startswith(incomplete)]


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


def jobs(ids: JobIds = None, *, json: Json = False) -> None:
    """Show your jobs on this box: what waits, with its queue position and why, and what runs.

    Tasks of an array that wait share a line. With ids, each of those jobs is shown, also if it is over. If a job waits or
    runs and the keeper is gone, this starts it again. `gpu-pool history` shows what is over.
    """
    from .job_store import JobStore, jobs_folder  # noqa: PLC0415 - only where it is needed
    from .job_view import find_jobs, job_json, live_table  # noqa: PLC0415

    store = JobStore(jobs_folder(os.environ))
    records, waiting = load_live(store)
    live = [record for record in records.values() if not record.life.state.is_over]
    shown = find_jobs(records, ids) if ids else live
    if json:
        print_json("jobs", {"jobs": [job_json(record, waiting.get(str(record.key))) for record in shown]})
        return
    if not shown:
        over = len(records) - len(live)
        complain("no job waits or runs" + (f"; {count(over, 'job')} over: gpu-pool history" if over else ""))
        return
    console = out()
    print_table(console, live_table(shown, records.values(), waiting, is_each=bool(ids)))


def load_live(store: JobStore) -> tuple[dict[JobKey, JobRecord], dict[str, Any]]:
    """All jobs, and how those that wait do, from the keeper. It is started if there are jobs for it; where that fails, what
    the files say is shown.
    """
    from .keeper_link import ask_keeper  # noqa: PLC0415

    records = store.load()
    live = {key.number for key, record in records.items() if not record.life.state.is_over}
    waiting: dict[str, Any] = {}
    if live:
        try:
            waiting = ask_keeper(store, {"do": "state"}).get("waiting", {})
        except Failure as failure:
            complain(str(failure))
        for number in live:
            records |= {record.key: record for record in store.load_number(number)}
    return records, waiting
