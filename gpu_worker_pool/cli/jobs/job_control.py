"""Cancelling tasks, and `gpu-pool retry`."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.output import complain, out
from gpu_worker_pool.failure import REFUSED, USAGE, Failure

from .jobs import JobIds, load_live, own_store

if TYPE_CHECKING:
    from gpu_worker_pool.jobs.job_record import JobRecord
    from gpu_worker_pool.jobs.job_spec import JobKey
    from gpu_worker_pool.jobs.submission import Record, Submission


def cancel_tasks(record: JobRecord, indices: Sequence[int | None]) -> dict[str, list[JobKey]]:
    """Cancel those of these tasks that wait, and have those ended that run; what became of each. Where nothing can be written,
    what runs is ended all the same; Failure where something waits then.
    """
    from gpu_worker_pool.jobs.keeper import tell_runs  # noqa: PLC0415 - only where it is needed
    from gpu_worker_pool.jobs.submission import JobState, cancelled  # noqa: PLC0415

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
    """Run jobs again that are over.

    Jobs rerun with their original command, directory and environment, and with all their --retries. They queue behind what
    has been submitted since. The number of an array means its tasks that failed; with --all, all its tasks. Ends with 1 if
    a job cannot be run again: it is not over yet, or a job that it comes after has failed.
    """
    from gpu_worker_pool.jobs.submission import retried, what_holds  # noqa: PLC0415 - only where it is needed

    from .job_view import find_jobs, parse_ids, say_of_jobs  # noqa: PLC0415

    if not ids:
        raise Failure("name the jobs to run again, as `gpu-pool history` shows them", USAGE)
    store, named = own_store(), parse_ids(ids)
    records = load_live(store, {key.number for key in named})
    records |= store.load({key.number for one in records.values() for key in one.spec.after_keys} - records.keys())
    found = find_jobs(records, ids)
    done: dict[str, list[JobKey]] = {"retried": [], "live": [], "unreadable": [], "good": []}
    held: dict[str, str] = {}
    for number in sorted({job.key.number for job in found}):
        record, meant = records[number], [job.key.index for job in found if job.key.number == number]
        # A task that is named by itself is meant, however it ended.
        has_all = (
            all_ or record.spec.array is None or all(key.index is not None for key in named if key.number == number)
        )
        hold = what_holds(record.submission, {other: one.submission for other, one in records.items()}, time.time())
        if record.trouble is not None:
            done["unreadable"] += [job.key for job in found if job.key.number == number]
        elif hold is not None and hold.skip is not None:
            first = hold.waits_for.removeprefix("after ")
            held[str(number)] = (
                f"{hold.skip}; run `gpu-pool retry {first}` first, or submit it again with --after-failure run"
            )
        else:

            def decide(
                submission: Submission, meant: list[int | None] = meant, has_all: bool = has_all
            ) -> list[Record]:
                again = retried(submission, meant, store.last_number(), has_all=has_all)
                indices = {task.index for task in again}
                for task in map(submission.task, meant):
                    kind = "live" if not task.state.is_over else "retried" if task.index in indices else "good"
                    done[kind].append(submission.key(task))
                return [*again]

            store.note_live(number)  # before: the keeper takes the name away again, where it is not needed
            record.write(decide)
    if done["retried"]:
        with suppress(Failure):
            load_live(store)
    say_of_jobs(done["retried"], "is submitted again", "are submitted again", out().print)
    say_of_jobs(
        done["good"],
        "ended well and is not run again; --all runs it too",
        "ended well and are not run again; --all runs them too",
        complain,
    )
    say_of_jobs(
        done["live"],
        "is not over yet; `gpu-pool cancel` ends it",
        "are not over yet; `gpu-pool cancel` ends them",
        complain,
    )
    submit_again = "cannot be run again: its files cannot be read; submit it again"
    say_of_jobs(done["unreadable"], submit_again, submit_again, complain)
    for number_text, why in held.items():
        complain(f"job {number_text} would be skipped again: {why}")
    return REFUSED if done["live"] or done["unreadable"] or held else 0
