"""`gpu-pool cancel` and `gpu-pool retry`: what the keeper is asked to do with jobs."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.cli.options import Json
from gpu_worker_pool.cli.output import complain, confirm, err, out, print_json
from gpu_worker_pool.cli.units import count

from .jobs import JobIds


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
    from .job_store import JobStore, jobs_folder  # noqa: PLC0415 - only where it is needed
    from .job_view import command_text, find_jobs, say_of_jobs  # noqa: PLC0415
    from .keeper_link import ask_keeper  # noqa: PLC0415

    if bool(ids) == mine:
        raise Failure("name the jobs to cancel, as `gpu-pool jobs` shows them, or give --mine, and not both", USAGE)
    store = JobStore(jobs_folder(os.environ))
    records = store.load()
    live = [record for record in records.values() if not record.life.state.is_over]
    found = live if mine else find_jobs(records, ids or ())
    if mine and live and not yes:
        if not sys.stdin.isatty():
            raise Failure(
                f"this would cancel {count(len(live), 'job')}; give --yes, as nobody can be asked here", USAGE
            )
        for record in live:
            err().print(f"{record.key} {record.life.state}: {command_text(record)}")
        if not confirm(f"Cancel {count(len(live), 'job')}?"):
            return 0
    done: dict[str, Any] = {"cancelled": [], "ending": [], "over": []}
    # A keeper may know more of a job than its files say.
    if any(not record.life.state.is_over or record.trouble for record in found):
        named = [str(record.key) for record in found] if mine else [text.strip() for text in ids or ()]
        done |= ask_keeper(store, {"do": "cancel", "ids": named})
    else:
        done["over"] = [str(record.key) for record in found]
    if json:
        print_json("cancel", done)
    else:
        say_of_jobs(done["cancelled"], "is cancelled", "are cancelled", out().print)
        say_of_jobs(done["ending"], "is being ended", "are being ended", out().print)
    say_of_jobs(done["over"], "was over before", "were over before", complain)
    if mine and not found:
        complain("no job of yours waits or runs")
    return REFUSED if done["over"] else 0


def retry(ids: JobIds = None, *, json: Json = False) -> int:
    """Run jobs again that are over.

    They have their command, directory and environment of then. They wait behind what was submitted until now, with all their --retries again. The id of an array means all its tasks
    that are over. Ends with 1 if one of the jobs is not over yet.
    """
    from .job_store import JobStore, jobs_folder  # noqa: PLC0415 - only where it is needed
    from .job_view import find_jobs, say_of_jobs  # noqa: PLC0415
    from .keeper_link import ask_keeper  # noqa: PLC0415

    if not ids:
        raise Failure("name the jobs to run again, as `gpu-pool history` shows them", USAGE)
    store = JobStore(jobs_folder(os.environ))
    found = [str(record.key) for record in find_jobs(store.load(), ids)]
    done: dict[str, Any] = ask_keeper(store, {"do": "retry", "ids": found})
    if json:
        print_json("retry", done)
    else:
        say_of_jobs(done["retried"], "is submitted again", "are submitted again", out().print)
    say_of_jobs(
        done["live"],
        "is not over yet; `gpu-pool cancel` ends it",
        "are not over yet; `gpu-pool cancel` ends them",
        complain,
    )
    submit_again = "cannot be run again: its files cannot be read; submit it again"
    say_of_jobs(done["unreadable"], submit_again, submit_again, complain)
    return REFUSED if done["live"] or done["unreadable"] else 0
