"""`gpu-pool cancel` and `gpu-pool retry`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.options import Json
from gpu_worker_pool.cli.output import complain, confirm, err, out, print_json
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.failure import REFUSED, USAGE, Failure

from .jobs import JobIds, load_live, own_store

if TYPE_CHECKING:
    from gpu_worker_pool.jobs.job_key import JobKey
    from gpu_worker_pool.jobs.job_store import JobRecord

    from .job_view import Job


def cancel(
    ids: JobIds = None,
    *,
    mine: Annotated[bool, Option("--mine", help="All your jobs on this box that wait or run.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="With --mine: do not ask before.")] = False,
    json: Json = False,
) -> int:
    """Take jobs out of the queue, and end those that run.

    A command that runs gets SIGTERM, and SIGKILL after its --grace. The id of an array means all its tasks. Jobs that come after a cancelled one do what their --after-failure says. Ends
    with 1 if one of the jobs was over before.
    """
    from .job_view import find_jobs, jobs_of, parse_ids, say_of_jobs  # noqa: PLC0415 - only where it is needed

    if bool(ids) == mine:
        raise Failure("name the jobs to cancel, as `gpu-pool jobs` shows them, or give --mine, and not both", USAGE)
    store = own_store()
    records = store.load(store.live_numbers() if mine else {key.number for key in parse_ids(ids or ())})
    found = find_jobs(records, ids) if ids else [job for job in jobs_of(records.values()) if not job.life.state.is_over]
    if mine and found and not yes and not _is_confirmed(found):
        return 0
    done: dict[str, list[JobKey]] = {"cancelled": [], "ending": [], "over": []}
    for number in sorted({job.key.number for job in found}, reverse=True):
        for name, keys in cancel_tasks(
            records[number], [job.key.index for job in found if job.key.number == number]
        ).items():
            done[name] = keys + done[name]
    if done["cancelled"] or done["ending"]:
        load_live(store)  # the keeper withdraws their requests
    if json:
        print_json("cancel", {name: [str(key) for key in keys] for name, keys in done.items()})
    else:
        say_of_jobs(done["cancelled"], "is cancelled", "are cancelled", out().print)
        say_of_jobs(done["ending"], "is being ended", "are being ended", out().print)
    say_of_jobs(done["over"], "was over before", "were over before", complain)
    if mine and not found:
        complain("no job of yours waits or runs")
    return REFUSED if done["over"] else 0


def _is_confirmed(found: Sequence[Job]) -> bool:
    if not sys.stdin.isatty():
        raise Failure(
            f"this would cancel {count(len(found), 'job')}; confirm it with --yes",
            USAGE,
        )
    for job in found:
        err().print(f"{job.key} {job.life.state}: {job.command_text}")
    return confirm(f"Cancel {count(len(found), 'job')}?")


def cancel_tasks(record: JobRecord, indices: Sequence[int | None]) -> dict[str, list[JobKey]]:
    """Cancel those of these tasks that wait, and have those ended that run; what became of each. Where nothing can be written,
    what runs is ended all the same; Failure where something waits then.
    """
    from gpu_worker_pool.jobs.keeper import tell_runs  # noqa: PLC0415 - only where it is needed
    from gpu_worker_pool.jobs.life import CancelAsked, JobEvent, JobState, Submission  # noqa: PLC0415

    done: dict[str, list[JobKey]] = {"cancelled": [], "ending": [], "over": []}
    running: set[str] = set()

    def decide(submission: Submission) -> list[JobEvent]:
        for life in map(submission.life, indices):
            is_running = life.state is JobState.RUNNING
            done["over" if life.state.is_over else "ending" if is_running else "cancelled"].append(life.key)
            running.update([life.run or ""] if is_running else [])
        live = [key.index for key in (*done["cancelled"], *done["ending"])]
        return [CancelAsked(at=time.time(), indices=tuple(live))] if live else []

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
            raise Failure(
                f"no job that waits can be written down as cancelled: {why}; make room, and repeat it{ended}"
            ) from None
        return done
    tell_runs(record, signal.SIGUSR1, running)
    return done


def retry(
    ids: JobIds = None,
    *,
    all_: Annotated[bool, Option("--all", help="Also the tasks that ended well.")] = False,
    json: Json = False,
) -> int:
    """Run jobs again that are over.

    They have their command, directory and environment of then. They wait behind what was submitted until now, with all their
    --retries again. The id of an array means its tasks that did not end well; with --all, all that are over. Ends with 1 if one
    of the jobs cannot be run again now: it is not over yet, or a job of its --after has not ended well.
    """
    from gpu_worker_pool.jobs.life import JobEvent, Submission, TasksRetried, to_retry  # noqa: PLC0415 - only where it is needed
    from gpu_worker_pool.jobs.plan import what_holds  # noqa: PLC0415

    from .job_view import find_jobs, parse_ids, say_of_jobs  # noqa: PLC0415

    if not ids:
        raise Failure("name the jobs to run again, as `gpu-pool history` shows them", USAGE)
    store, named = own_store(), parse_ids(ids)
    records = load_live(store, {key.number for key in named})
    records |= store.load(
        {key.number for one in records.values() for key in one.submission.terms.after} - records.keys()
    )
    found = find_jobs(records, ids)
    done: dict[str, list[JobKey]] = {"retried": [], "live": [], "unreadable": [], "good": []}
    held: dict[str, str] = {}
    for number in sorted({job.key.number for job in found}):
        record, meant = records[number], [job.key.index for job in found if job.key.number == number]
        # A task that is named by itself is meant, however it ended.
        has_all = (
            all_ or record.spec.array is None or all(key.index is not None for key in named if key.number == number)
        )
        hold = what_holds(record.submission, {other: one.submission for other, one in records.items()})
        if record.trouble is not None:
            done["unreadable"] += [job.key for job in found if job.key.number == number]
        elif hold is not None and hold.why is not None:
            held[str(number)] = (
                f"{hold.why}; `gpu-pool retry {hold.after}` first, or submit it with --after-failure run"
            )
        else:

            def decide(
                submission: Submission, meant: list[int | None] = meant, has_all: bool = has_all
            ) -> list[JobEvent]:
                again = to_retry(submission, meant, has_all=has_all)
                for life in map(submission.life, meant):
                    kind = "live" if not life.state.is_over else "retried" if life.key.index in again else "good"
                    done[kind].append(life.key)
                behind = store.last_number()
                return [TasksRetried(at=time.time(), behind=behind, indices=tuple(again))] if again else []

            store.note_live(number)  # before: the keeper takes the name away again, where it is not needed
            record.write(decide)
    if done["retried"]:
        with suppress(Failure):
            load_live(store)
    shown = {name: [str(key) for key in keys] for name, keys in done.items()}
    if json:
        print_json("retry", {**shown, "held": held})
    else:
        say_of_jobs(done["retried"], "is submitted again", "are submitted again", out().print)
        say_of_jobs(
            done["good"],
            "ended well, and is not run again; --all runs it too",
            "ended well, and are not run again; --all runs them too",
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
