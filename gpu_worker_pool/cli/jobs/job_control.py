"""Cancelling tasks, and `gpu-pool retry`."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Annotated, Final

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.output import complain, out
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.jobs.job_record import JobRecord
from gpu_worker_pool.jobs.job_spec import JobKey
from gpu_worker_pool.jobs.job_store import own_store
from gpu_worker_pool.jobs.keeper import tell_runs
from gpu_worker_pool.jobs.submission import JobState, Record, Submission, cancelled, retried, what_holds

from .job_view import find_jobs, parse_ids, say_of_jobs
from .jobs import JobIds, load_live

# What is said of the jobs that `retry` has found so: of one, and of several tasks of an array.
_RETRIED: Final = {
    "retried": ("is submitted again", "are submitted again"),
    "good": (
        "ended well and is not run again; --all runs it too",
        "ended well and are not run again; --all runs them too",
    ),
    "live": ("is not over yet; `gpu-pool cancel` ends it", "are not over yet; `gpu-pool cancel` ends them"),
}


def cancel_tasks(record: JobRecord, indices: Sequence[int | None]) -> dict[str, list[JobKey]]:
    """Cancel those of these tasks that wait, and have those ended that run; what became of each. Where nothing can be written,
    what runs is ended all the same; Failure where something waits then.
    """
    done: dict[str, list[JobKey]] = {"cancelled": [], "ending": [], "over": []}
    running: set[str] = set()

    def decide(submission: Submission) -> list[Record]:
        for task in map(submission.task, indices):
            is_running = task.state is JobState.RUNNING
            kind = "over" if task.state.is_over else "ending" if is_running else "cancelled"
            done[kind].append(submission.key(task))
            running.update([task.run or ""] if is_running else [])
        return [*cancelled(submission, time.time(), indices)]

    try:
        record.write(decide)
    except OSError as error:
        record.refresh()
        if not any(done.values()):
            decide(record.submission)
        tell_runs(record, signal.SIGUSR2, running)
        if done["cancelled"]:
            ended = f"; being ended: {', '.join(map(str, done['ending']))}" if done["ending"] else ""
            why = error.strerror or str(error)
            raise Failure(f"waiting jobs cannot be cancelled: {why}; free some space, and try again{ended}") from None
        return done
    tell_runs(record, signal.SIGUSR1, running)
    return done


def retry(
    ids: JobIds = None,
    *,
    all_: Annotated[bool, Option("--all", help="Also the tasks that ended well.")] = False,
) -> int:
    """Run finished jobs again.

    Jobs rerun with their original command, directory and environment, and with all their --retries. They queue behind what
    has been submitted since. The number of an array means its tasks that failed; with --all, all its tasks. Ends with 1 if
    a job cannot be run again: it is not over yet, or a job that it depends on has failed.
    """
    if not ids:
        raise Failure("name the jobs to run again, as `gpu-pool history` shows them", USAGE)
    store, named = own_store(), parse_ids(ids)
    records = load_live(store, {key.number for key in named})
    records |= store.load({key.number for one in records.values() for key in one.spec.after_keys} - records.keys())
    done: dict[str, list[JobKey]] = {kind: [] for kind in _RETRIED}
    refused: list[str] = []
    meant: dict[int, list[int | None]] = {}
    for job in find_jobs(records, ids):
        meant.setdefault(job.key.number, []).append(job.key.index)
    for number, indices in sorted(meant.items()):
        record = records[number]
        # A task that is named by itself is meant, however it ended.
        is_array = record.spec.array is not None and any(key == JobKey(number) for key in named)
        hold = what_holds(record.submission, {other: one.submission for other, one in records.items()}, time.time())
        if record.trouble is not None:
            refused.append(f"job {number} cannot be run again: its files cannot be read; submit it again")
            continue
        if hold is not None and hold.skip is not None:
            first = hold.waits_for.removeprefix("after ")
            refused.append(
                f"job {number} would be skipped again: {hold.skip}; run `gpu-pool retry {first}` first, or submit it again with "
                "--after-failure run"
            )
            continue

        def decide(
            now: Submission, indices: list[int | None] = indices, has_all: bool = all_ or not is_array
        ) -> list[Record]:
            again = retried(now, indices, store.last_number(), has_all=has_all)
            waiting = {task.index for task in again}
            for task in map(now.task, indices):
                kind = "live" if not task.state.is_over else "retried" if task.index in waiting else "good"
                done[kind].append(now.key(task))
            return [*again]

        store.note_live(number)  # before: the keeper takes the name away again, where it is not needed
        record.write(decide)
    if done["retried"]:
        load_live(store)
    for kind, words in _RETRIED.items():
        say_of_jobs(done[kind], *words, out().print if kind == "retried" else complain)
    for why in refused:
        complain(why)
    return REFUSED if done["live"] or refused else 0
