"""`gpu-pool release`: release a lease for its holder."""

from __future__ import annotations

import sys
from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlencode

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json
from gpu_worker_pool.cli.output import complain, confirm, err, out, plain, print_json
from gpu_worker_pool.cli.pools.lease_search import EMPTY_ID, LeaseIds, ask_pools_or_fail, find_lease, lease_path
from gpu_worker_pool.cli.pools.reading import read_lease
from gpu_worker_pool.cli.pools.report import LeaseReport, distinct_leases, show_gpus
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.host.users import user_name

# A lease before and after; and an id, its endpoint where that is known, and why it was not released.
_Released = tuple[LeaseReport, LeaseReport]
Reason = Annotated[
    str | None, Option("--reason", metavar="TEXT", help="Why; the holder, the log and `explain` show it.")
]
_NotReleased = tuple[str, str | None, Failure]


def release(
    ids: LeaseIds = None,
    reason: Reason = None,
    endpoint: Endpoints = None,
    *,
    mine: Annotated[bool, Option("--mine", help="All leases of the user who asks, waiting ones too.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="With --mine: do not ask before.")] = False,
    fleet: FleetScope = False,
    json: Json = False,
) -> int:
    """Give leases back, or take requests out of the queue.

    A worker that still runs is told that its lease is lost; the GPU goes to nobody else while its processes are seen
    to hold memory there. Only a lease's owner, an operator and an administrator may do this. On the
    server's machine you are your Unix user; from elsewhere GPU_POOL_TOKEN tells who you are.
    Ends with 1 if one of them is not known or not yours.
    """
    if bool(ids) == mine:
        raise Failure(
            "name the leases to release, as `gpu-pool leases` shows them, or give --mine, and not both", USAGE
        )
    if not all(ids or ()):
        raise Failure(EMPTY_ID, USAGE)
    found, failed = Servers(endpoint, is_fleet=fleet).run(lambda servers: _find(servers, ids))
    if mine and not (found and _may_release(found, is_sure=yes)):
        if not found:
            complain(f"{user_name()} has no leases")
        return 0
    released, not_released = Servers(endpoint, is_fleet=fleet).run(lambda servers: _release(servers, found, reason))
    failed += not_released
    if json:
        done = [{**after.as_json(), "was": before.view.state} for before, after in released]
        not_done = [{"id": id_, "endpoint": where, "error": str(failure)} for id_, where, failure in failed]
        print_json("release", {"released": done, "failed": not_done})
    else:
        for before, _ in released:
            out().print(_in_words(before))
    for _, _, failure in failed:
        complain(str(failure))
    if any(before.view.state == "active" for before, _ in released):
        complain("a worker that still uses a released GPU is told that its lease is lost, and has to stop")
    return max((failure.code for _, _, failure in failed), default=0)


def _may_release(found: list[LeaseReport], *, is_sure: bool) -> bool:
    """Ask the user whether to release all of these."""
    if is_sure:
        return True
    if not sys.stdin.isatty():
        raise Failure(
            f"this would release {count(len(found), 'lease')}; give --yes, as nobody can be asked here", USAGE
        )
    for lease in found:
        what = "waits" if lease.view.state == "queued" else f"holds {show_gpus(lease.gpu_ids)}"
        err().print(f"{lease.id} {what}" + (f", for `{lease.command}`" if lease.command else ""))
    return confirm(f"Release {count(len(found), 'lease')}?")


async def _find(servers: Servers, ids: list[str] | None) -> tuple[list[LeaseReport], list[_NotReleased]]:
    """The leases of these ids; without ids, those of the user who asks."""
    reports = await ask_pools_or_fail(servers)
    if not ids:
        owner = user_name()  # as the server names a caller on its machine
        live = [each for each in distinct_leases(reports) if each.view.owner == owner]
        # Those that wait come first, and the last of them before all: otherwise they would get the GPUs of the others.
        waiting = [each for each in live if each.view.state == "queued"]
        return [*reversed(waiting), *(each for each in live if each.view.state == "active")], []
    found: list[LeaseReport] = []
    failed: list[_NotReleased] = []
    for text in dict.fromkeys(ids):
        try:
            found += await find_lease(servers, reports, text)
        except Failure as failure:
            failed.append((text, None, failure))
    return found, failed


async def _release(
    servers: Servers, found: list[LeaseReport], reason: str | None
) -> tuple[list[_Released], list[_NotReleased]]:
    released: list[_Released] = []
    failed: list[_NotReleased] = []
    for lease in found:
        try:
            released.append((lease, await _release_at(servers, lease, reason)))
        except Failure as failure:
            failed.append((lease.id, lease.endpoint, failure))
    return released, failed


async def _release_at(servers: Servers, lease: LeaseReport, reason: str | None) -> LeaseReport:
    said = f"?{urlencode({'reason': reason})}" if reason else ""
    answer = await servers.ask(lease.endpoint, f"{lease_path(lease.id)}{said}", "DELETE")
    if answer.is_ok:
        after = read_lease(servers, answer)
        if after is not None and after.id == lease.id:
            return after
        unsure = f"whether {lease.id} was released is not known: the answer of {answer.url} shows no such lease"
        raise Failure(f"{unsure}; `gpu-pool leases` lists those there are")
    detail = f"{lease.id} was not released: {plain(answer.error)}"
    if answer.status is None or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise Failure(f"{detail.rstrip('.')}; try again")
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        owner = lease.view.owner or "its owner"
        detail += f" On the server's machine {owner}, its operators and root may release it; from elsewhere log in "
        detail += f"with a token of {owner} or of an operator (`gpu-pool login`), or set GPU_POOL_TOKEN to it."
    raise Failure(detail, REFUSED)


def _in_words(lease: LeaseReport) -> str:
    view, whose = lease.view, lease.view.owner or lease.holder
    match view.state:
        case "queued":
            return f"{whose} left the queue at {lease.endpoint} ({lease.id})"
        case "active":
            return f"gave back {show_gpus(lease.gpu_ids)} of {whose} ({lease.id})"
        case "draining":
            return f"{lease.id} of {whose} was over before: {view.reason}"
    return f"{lease.id} of {whose} was over before: {view.end_reason}"
