"""`gpu-pool cancel`, which is also called `release`: stop jobs, runs and requests that wait, and end leases."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlencode

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import complain, confirm, err, out, plain, print_json
from gpu_worker_pool.cli.pools.reading import ask_pools_or_fail, complete_lease_id, find_lease, lease_path, read_lease
from gpu_worker_pool.cli.pools.report import LeaseReport, show_gpus
from gpu_worker_pool.cli.pools.servers import Servers, failure_of
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.jobs.job_spec import JobKey, parse_key
from gpu_worker_pool.jobs.job_store import JobStore, own_store

from .job_control import cancel_tasks
from .job_view import Job, find_jobs, jobs_of, say_of_jobs
from .jobs import complete_id, load_live
from .own_leases import beside_jobs, see_leases

# A lease, or an id that no lease has, and why it was not ended.
_NotEnded = tuple[str, Failure]


def _complete(incomplete: str) -> list[tuple[str, str]]:
    return [*complete_id(incomplete), *complete_lease_id(incomplete)]


def cancel(
    ids: Annotated[
        list[str] | None,
        Argument(
            metavar="[ID]...",
            help="Each as `jobs` shows it: a job's number, or the beginning of a lease's id.",
            complete=_complete,
        ),
    ] = None,
    *,
    mine: Annotated[
        bool, Option("--mine", help="Everything of yours: jobs on this box, and leases on the servers.")
    ] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="With --mine: do not ask first.")] = False,
    reason: Annotated[
        str | None,
        Option("--reason", metavar="TEXT", help="The reason, shown to the holder of a lease and in its history."),
    ] = None,
    endpoint: Endpoints = None,
    json: Json = False,
) -> int:
    """Stop what runs, and take what waits out of the queue.

    The command of a job or a `run` gets SIGTERM, and SIGKILL after its --grace. A Python program is told that its lease is
    lost. The number of an array means all its tasks. Operators may also stop what belongs to others. Ends with 1 if
    one of them had ended already, does not exist, or is not yours.
    """
    if bool(ids) == mine:
        raise Failure("name what to cancel, as `gpu-pool jobs` shows it, or give --mine, and not both", USAGE)
    if not all(ids or ()):
        raise Failure("an id is empty; `gpu-pool jobs` lists yours", USAGE)
    store, servers, failed = own_store(), Servers(endpoint, is_fleet=True), list[_NotEnded]()
    if ids:
        found, texts = _jobs_of(store, ids)
        leases, failed = servers.run(lambda opened: _find(opened, texts)) if texts else ([], [])
    else:
        found, leases = _all_of_mine(store, endpoint)
        if not found and not leases:
            complain("you have nothing running or waiting")
            return 0
        if not yes and not _is_wanted(found, leases):
            return 0
    done = _cancel_jobs(store, found)
    ended, not_ended = servers.run(lambda opened: _end(opened, leases, reason)) if leases else ([], [])
    failed += not_ended
    _report(done, ended, failed, json=json)
    codes = [failure.code for _, failure in failed]
    return max([*codes, REFUSED if done["over"] else 0])


def _report(
    done: dict[str, list[JobKey]],
    ended: Sequence[tuple[LeaseReport, LeaseReport]],
    failed: Sequence[_NotEnded],
    *,
    json: bool,
) -> None:

    if json:
        print_json(
            "cancel",
            {
                **{name: [str(key) for key in keys] for name, keys in done.items()},
                "released": [{"endpoint": after.endpoint, **after.body} for _, after in ended],
                "failed": [{"id": id_, "error": str(failure)} for id_, failure in failed],
            },
        )
    else:
        say_of_jobs(done["cancelled"], "is cancelled", "are cancelled", out().print)
        say_of_jobs(done["ending"], "is being ended", "are being ended", out().print)
        for before, _ in ended:
            out().print(_in_words(before))
    say_of_jobs(done["over"], "was over already", "were over already", complain)
    for _, failure in failed:
        complain(str(failure))


# --- what is meant -----------------------------------------------------------------------------------------------------


def _jobs_of(store: JobStore, ids: Sequence[str]) -> tuple[list[Job], list[str]]:
    """The jobs among these ids, and the other texts, which may be leases."""
    of_jobs: list[str] = []
    texts: list[str] = []
    for text in dict.fromkeys(ids):
        try:
            is_job = store.load_one(parse_key(text).number) is not None
        except ValueError:
            is_job = False
        (of_jobs if is_job else texts).append(text)
    numbers = {parse_key(text).number for text in of_jobs}
    return find_jobs(store.load(numbers), of_jobs), texts


def _all_of_mine(store: JobStore, endpoint: list[str] | None) -> tuple[list[Job], list[LeaseReport]]:
    records = store.load(store.live_numbers())
    seen = see_leases(endpoint)
    for trouble in seen.troubles:
        complain(trouble)
    mine = [each for each in beside_jobs(seen.leases, records.values()) if seen.is_mine(each)]
    # Those that wait come first, and the last of them before all: otherwise they would get the GPUs of the others.
    waiting = [each for each in mine if each.view.state == "queued"]
    leases = [*reversed(waiting), *(each for each in mine if each.view.state == "active")]
    return [job for job in jobs_of(records.values()) if not job.task.state.is_over], leases


async def _find(servers: Servers, texts: Sequence[str]) -> tuple[list[LeaseReport], list[_NotEnded]]:
    reports = await ask_pools_or_fail(servers)
    found: list[LeaseReport] = []
    failed: list[_NotEnded] = []
    for text in texts:
        try:
            found += await find_lease(servers, reports, text)
        except Failure as failure:
            failed.append((text, failure))
    return found, failed


def _is_wanted(jobs: Sequence[Job], leases: Sequence[LeaseReport]) -> bool:
    """Ask the user whether to stop all of these."""
    parts = [count(len(jobs), "job")] if jobs else []
    parts += [count(len(leases), "lease")] if leases else []
    all_of_them = " and ".join(parts)
    if not sys.stdin.isatty():
        raise Failure(f"this would cancel {all_of_them}; confirm it with --yes", USAGE)
    for job in jobs:
        err().print(f"{job.key} {job.task.state}: {job.command_text}")
    for lease in leases:
        what = "waits" if lease.view.state == "queued" else f"holds {show_gpus(lease.gpu_ids)}"
        err().print(f"{lease.id} {what}" + (f": {lease.command}" if lease.command else ""))
    return confirm(f"Cancel {all_of_them}?")


# --- what is done ------------------------------------------------------------------------------------------------------


def _cancel_jobs(store: JobStore, found: Sequence[Job]) -> dict[str, list[JobKey]]:
    """What became of each job."""
    done: dict[str, list[JobKey]] = {"cancelled": [], "ending": [], "over": []}
    if not found:
        return done

    for number in sorted({job.key.number for job in found}, reverse=True):
        of_one = [job for job in found if job.key.number == number]
        for name, keys in cancel_tasks(of_one[0].record, [job.key.index for job in of_one]).items():
            done[name] = keys + done[name]
    if done["cancelled"] or done["ending"]:
        load_live(store)  # the keeper withdraws their requests
    return done


async def _end(
    servers: Servers, leases: Sequence[LeaseReport], reason: str | None
) -> tuple[list[tuple[LeaseReport, LeaseReport]], list[_NotEnded]]:
    """Each lease before and after; and those that were not ended."""
    ended: list[tuple[LeaseReport, LeaseReport]] = []
    failed: list[_NotEnded] = []
    query = f"?{urlencode({'reason': reason})}" if reason else ""
    for lease in leases:
        answer = await servers.ask(lease.endpoint, f"{lease_path(lease.id)}{query}", "DELETE")
        after: Any = read_lease(servers, answer) if answer.is_ok else None
        if after is not None and after.id == lease.id:
            ended.append((lease, after))
            continue
        if answer.is_ok:
            unsure = f"{lease.id} may not be cancelled: the answer of {answer.url} shows no such lease"
            failed.append((lease.id, Failure(f"{unsure}; see `gpu-pool jobs --all`")))
            continue
        detail = f"{lease.id} was not cancelled: {plain(answer.error)}"
        is_away = answer.status is None or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        failed.append(
            (lease.id, Failure(f"{detail.rstrip('.')}; try again") if is_away else failure_of(answer, detail))
        )
    return ended, failed


def _in_words(lease: LeaseReport) -> str:
    view, whose = lease.view, lease.view.owner or lease.holder
    what = f" ({lease.command})" if lease.command else ""
    match view.state:
        case "queued":
            return f"{whose}'s request{what} left the queue ({lease.id})"
        case "active":
            return f"{whose}'s lease{what} on {show_gpus(lease.gpu_ids)} is ended ({lease.id})"
    return f"{whose}'s lease{what} had ended already: {view.end_reason or view.reason} ({lease.id})"
