"""`gpu-pool jobs hold|release|first|edit`: change submitted jobs that have not started yet."""

from __future__ import annotations

import time as clock
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.options import MemoryPerGpu, Model, TimeLimit
from gpu_worker_pool.cli.output import complain, out
from gpu_worker_pool.cli.run.asking import check_servers
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.jobs.job_record import JobRecord
from gpu_worker_pool.jobs.job_store import own_store
from gpu_worker_pool.jobs.submission import JobState

from .job_view import find_jobs, parse_ids
from .jobs import complete_id, load_live
from .jobs import jobs as jobs  # noqa: PLC0414 - the command without a word behind it

Ids = Annotated[list[str], Argument(metavar="ID...", help="Jobs by their numbers.", complete=complete_id)]


def hold(ids: Ids) -> int:
    """Keep these jobs from starting until they are released. Jobs that run go on."""
    return _change(ids, lambda _: {"is_held": True}, "is held", only_waiting=False)


def release(ids: Ids) -> int:
    """Let jobs go on that were held."""

    def change(record: JobRecord) -> dict[str, Any]:
        if not record.submission.whole.is_held:
            raise Failure("it is not held", REFUSED)
        return {"is_held": False}

    return _change(ids, change, "is released", only_waiting=False)


def first(ids: Ids) -> int:
    """Move jobs ahead of your other waiting jobs. Requests of other users stay where they are."""
    at = clock.time()
    return _change(ids, lambda _: {"first_at": at}, "is first of your jobs")


def edit(
    ids: Ids,
    gpus: Annotated[
        int | None, Option("--gpus", "-g", metavar="NUMBER", min=1, max=1024, help="How many GPUs.")
    ] = None,
    memory: MemoryPerGpu = None,
    model: Model = None,
    time: TimeLimit = None,
    priority: Annotated[int | None, Option("--priority", "-p", metavar="NUMBER", help="Higher goes first.")] = None,
) -> int:
    """Change what waiting jobs ask for. Their GPUs are requested again, at the end of the queue. Running tasks do not change."""
    given = {"gpus": gpus, "memory_mb": memory, "model": model, "time_limit_s": time, "priority": priority}
    edits: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not edits:
        raise Failure("say what to change: --gpus, --memory, --model, --time or --priority", USAGE)
    store = own_store()

    def change(record: JobRecord) -> dict[str, Any]:

        if record.submission.spec.batch is not None:
            raise Failure("it is a batch; cancel it, and start it again with other options", REFUSED)
        check_servers(replace(record.spec, **edits), store.environment_of(record.number))
        return {"edits": {**record.submission.whole.edits, **edits}}

    return _change(ids, change, "is changed")


def _change(
    ids: list[str], change: Callable[[JobRecord], dict[str, Any]], done: str, *, only_waiting: bool = True
) -> int:
    """Write which fields of each of these jobs become what, and say it. One that cannot be changed is told, and the others are."""
    named = parse_ids(ids)
    if task := next((key for key in named if key.index is not None), None):
        raise Failure(f"{task} is a task of an array; name the array: {task.number}", USAGE)
    store, failed = own_store(), 0
    records = store.load({key.number for key in named})
    find_jobs(records, ids)
    for number, record in records.items():
        try:
            if record.trouble is not None:
                raise Failure(f"its files cannot be read: {record.trouble}")  # noqa: TRY301
            if record.submission.is_over:
                raise Failure("it is over; `gpu-pool retry` runs it again", REFUSED)  # noqa: TRY301
            if only_waiting and not record.submission.counts[JobState.SUBMITTED]:
                raise Failure("it runs already, and nothing of it waits", REFUSED)  # noqa: TRY301
            fields = change(record)
            record.write(lambda now, fields=fields: [replace(now.whole, **fields)])  # type: ignore[misc]
        except (Failure, OSError) as error:
            complain(f"job {number} is not changed: {error}")
            failed = max(failed, error.code if isinstance(error, Failure) else REFUSED)
        else:
            out().print(f"job {number} {done}")
    load_live(store)  # the keeper acts on it
    return failed
