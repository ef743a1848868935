"""`gpu-pool release`: end leases for their holders, and take requests out of the queue."""

from __future__ import annotations

import sys
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlencode

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json
from gpu_worker_pool.cli.output import complain, confirm, err, out, plain, print_body
from gpu_worker_pool.cli.pools.lease_search import EMPTY_ID, LeaseIds, ask_pools_or_fail, find_lease, lease_path
from gpu_worker_pool.cli.pools.reading import ask_names, read_lease
from gpu_worker_pool.cli.pools.report import LeaseReport, distinct_leases, show_gpus
from gpu_worker_pool.cli.pools.servers import Servers, failure_of
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.failure import USAGE, Failure

Reason = Annotated[
    str | None, Option("--reason", metavar="TEXT", help="Why; the holder, the log and `explain` show it.")
]
# A lease, or an id that no lease has, and why it was not released.
_NotReleased = tuple[str, Failure]


def release(
    ids: LeaseIds = None,
    reason: Reason = None,
    endpoint: Endpoints = None,
    *,
    mine: Annotated[bool, Option("--mine", help="All your leases, waiting ones too.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="With --mine: do not ask first.")] = False,
    fleet: FleetScope = False,
    json: Json = False,
) -> int:
    """End leases, or take requests out of the queue.

    A program that still runs is told that its lease is lost; the GPU goes to nobody else while its processes hold memory
    there. A lease's owner, operators and administrators may do this. Ends with 1 if one of them is not known or not yours.
    """
    if bool(ids) == mine:
        raise Failure("name the leases to end, as `gpu-pool leases` shows them, or give --mine, and not both", USAGE)
    if not all(ids or ()):
        raise Failure(EMPTY_ID, USAGE)
    servers = Servers(endpoint, is_fleet=fleet)
    found, failed = servers.run(lambda opened: _find(opened, ids))
    if mine and not found:
        complain("you have no leases")
        return 0
    if mine and not yes and not _is_wanted(found):
        return 0
    released, not_released = servers.run(lambda opened: _release(opened, found, reason))
    failed += not_released
    if json:
        several = len(servers.ids) > 1
        done = [{**({"endpoint": after.endpoint} if several else {}), **after.body} for _, after in released]
        print_body({"released": done, "failed": [{"id": id_, "error": str(failure)} for id_, failure in failed]})
    else:
        for before, _ in released:
            out().print(_in_words(before))
    for _, failure in failed:
        complain(str(failure))
    if any(before.view.state == "active" for before, _ in released):
        complain("a program that still uses a released GPU is told that its lease is lost, and has to stop")
    return max((failure.code for _, failure in failed), default=0)


def _is_wanted(found: list[LeaseReport]) -> bool:
    """Ask the user whether to end all of these."""
    if not sys.stdin.isatty():
        raise Failure(f"this would end {count(len(found), 'lease')}; confirm it with --yes", USAGE)
    for lease in found:
        what = "waits" if lease.view.state == "queued" else f"holds {show_gpus(lease.gpu_ids)}"
        err().print(f"{lease.id} {what}" + (f", for `{lease.command}`" if lease.command else ""))
    return confirm(f"Release {count(len(found), 'lease')}?")


async def _find(servers: Servers, ids: list[str] | None) -> tuple[list[LeaseReport], list[_NotReleased]]:
    """The leases of these ids; without ids, those of the user who asks."""
    reports = await ask_pools_or_fail(servers)
    if not ids:
        names = await ask_names(servers)
        live = [each for each in distinct_leases(reports) if each.view.owner == names.get(each.endpoint)]
        # Those that wait come first, and the last of them before all: otherwise they would get the GPUs of the others.
        waiting = [each for each in live if each.view.state == "queued"]
        return [*reversed(waiting), *(each for each in live if each.view.state == "active")], []
    found: list[LeaseReport] = []
    failed: list[_NotReleased] = []
    for text in dict.fromkeys(ids):
        try:
            found += await find_lease(servers, reports, text)
        except Failure as failure:
            failed.append((text, failure))
    return found, failed


async def _release(
    servers: Servers, found: list[LeaseReport], reason: str | None
) -> tuple[list[tuple[LeaseReport, LeaseReport]], list[_NotReleased]]:
    """Each lease before and after; and those that were not released."""
    released: list[tuple[LeaseReport, LeaseReport]] = []
    failed: list[_NotReleased] = []
    query = f"?{urlencode({'reason': reason})}" if reason else ""
    for lease in found:
        answer = await servers.ask(lease.endpoint, f"{lease_path(lease.id)}{query}", "DELETE")
        after: Any = read_lease(servers, answer) if answer.is_ok else None
        if after is not None and after.id == lease.id:
            released.append((lease, after))
            continue
        if answer.is_ok:
            unsure = f"whether {lease.id} was released is not known: the answer of {answer.url} shows no such lease"
            failed.append((lease.id, Failure(f"{unsure}; `gpu-pool leases` lists those there are")))
            continue
        detail = f"{lease.id} was not released: {plain(answer.error)}"
        is_away = answer.status is None or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        failed.append(
            (lease.id, Failure(f"{detail.rstrip('.')}; try again") if is_away else failure_of(answer, detail))
        )
    return released, failed


def _in_words(lease: LeaseReport) -> str:
    view, whose = lease.view, lease.view.owner or lease.holder
    what = f" ({lease.command})" if lease.command else ""
    match view.state:
        case "queued":
            return f"{whose}'s request{what} left the queue at {lease.endpoint} ({lease.id})"
        case "active":
            return f"ended {whose}'s lease{what} on {show_gpus(lease.gpu_ids)} ({lease.id})"
    return f"{whose}'s lease{what} had ended before: {view.end_reason or view.reason} ({lease.id})"
