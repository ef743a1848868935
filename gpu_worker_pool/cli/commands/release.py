"""`gpu-pool release`: release a lease for its holder."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlencode

import typer

from gpu_worker_pool.cli.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import complain, out, plain, print_json
from gpu_worker_pool.cli.pools.lease_search import EMPTY_ID, LeaseIds, ask_pools_or_fail, find_lease, lease_path
from gpu_worker_pool.cli.pools.reading import read_lease
from gpu_worker_pool.cli.pools.report import LeaseReport, show_gpus
from gpu_worker_pool.cli.pools.servers import Servers

# A lease before and after; and an id, its endpoint where that is known, and why it was not released.
_Released = tuple[LeaseReport, LeaseReport]
Reason = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Why; the holder, the log and `explain` show it.")
]
_NotReleased = tuple[str, str | None, Failure]


def release(ids: LeaseIds, reason: Reason = None, endpoint: Endpoints = None, *, json: Json = False) -> int:
    """Give leases back, or take requests out of the queue.

    A worker that still runs is told that its lease is lost; the GPU goes to nobody else while its processes are seen
    to hold memory there. Only a lease's owner and an administrator may do this. On the
    server's machine you are your Unix user; from elsewhere GPU_POOL_TOKEN tells who you are.
    Ends with 1 if one of them is not known or not yours.
    """
    if not all(ids):
        raise Failure(EMPTY_ID, USAGE)
    released, failed = Servers(endpoint).run(lambda servers: _release(servers, ids, reason))
    if json:
        done = [{**after.as_json(), "was": before.view.state} for before, after in released]
        not_done = [{"id": id_, "endpoint": where, "error": str(failure)} for id_, where, failure in failed]
        print_json("release", {"released": done, "failed": not_done})
    else:
        for before, _ in released:
            out().print(_in_words(before), markup=False)
    for _, _, failure in failed:
        complain(str(failure))
    if any(before.view.state == "active" for before, _ in released):
        complain("a worker that still uses a released GPU is told that its lease is lost, and has to stop")
    return max((failure.code for _, _, failure in failed), default=0)


async def _release(servers: Servers, ids: list[str], reason: str | None) -> tuple[list[_Released], list[_NotReleased]]:
    released: list[_Released] = []
    failed: list[_NotReleased] = []
    reports = await ask_pools_or_fail(servers)
    for text in dict.fromkeys(ids):
        try:
            found = await find_lease(servers, reports, text)
        except Failure as failure:
            failed.append((text, None, failure))
            continue
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
        detail += f" On the server's machine {owner}, its administrators and root may release it; from elsewhere set "
        detail += f"GPU_POOL_TOKEN to the token of {owner} or of admin."
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
