"""Finding a lease by its id, or by the beginning of it, as git finds a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Final
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Argument
from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.failure import REFUSED, USAGE, Failure

from .reading import ask_pools, read_lease
from .report import LeaseReport, PoolReport, check_any_is_up, distinct_leases
from .servers import Servers

MOST_SHOWN: Final = 10
EMPTY_ID: Final = "the id is empty; `gpu-pool leases` lists those there are"
COMPLETE_WITHIN_S: Final = 2.0


def complete_lease_id(incomplete: str) -> list[tuple[str, str]]:
    """For the shell: the ids of live leases that begin so, with their holders."""
    leases = distinct_leases(Servers(timeout_s=COMPLETE_WITHIN_S).run(ask_pools))
    return [(lease.id, f"{lease.view.state}, {lease.holder}") for lease in leases if lease.id.startswith(incomplete)]


LeaseIds = Annotated[
    list[str] | None,
    Argument(metavar="[ID]...", help="Each by its id, or a beginning that no other has.", complete=complete_lease_id),
]


async def ask_pools_or_fail(servers: Servers) -> list[PoolReport]:
    """All pools; Failure where no server answered."""
    reports = await ask_pools(servers)
    check_any_is_up(reports)
    return reports


async def find_lease(servers: Servers, reports: Sequence[PoolReport], text: str) -> list[LeaseReport]:
    """The lease with this id or beginning, at each endpoint at which it waits. A lease that has ended is found by its
    whole id, for as long as its server remembers it. Failure where there is none, or where several ids begin so.
    """
    if not text:
        raise Failure(EMPTY_ID, USAGE)
    live = distinct_leases(reports)
    found = [lease for lease in live if lease.id == text]
    if not found:
        # Before it is taken for a beginning: run-1 does not mean run-10 only because run-1 has ended.
        able = [report for report in reports if report.is_up and report.has_leases and report.same_as is None]
        asked = (ask_lease(servers, report.endpoint, text) for report in able)
        found = [lease for lease in await asyncio.gather(*asked) if lease is not None]
    if not found:
        ids = sorted({lease.id for lease in live if lease.id.startswith(text)})
        if len(ids) > 1:
            more = f" and {len(ids) - MOST_SHOWN} more" if len(ids) > MOST_SHOWN else ""
            shown = ", ".join(ids[:MOST_SHOWN])
            raise Failure(f"{len(ids)} leases begin with {text}: {shown}{more}; write more of it", REFUSED)
        found = [lease for lease in live if lease.id in ids]
    if not found:
        raise Failure(_unknown(reports, text), REFUSED)
    return found


async def ask_lease(servers: Servers, endpoint: str, lease_id: str) -> LeaseReport | None:
    """A lease as its server shows it now, with its obstacles; None where the server does not know it."""
    answer = await servers.ask(endpoint, lease_path(lease_id))
    lease = read_lease(servers, answer) if answer.status == HTTPStatus.OK else None
    return lease if lease is not None and lease.id == lease_id else None


def lease_path(lease_id: str) -> str:
    return f"/leases/{quote(lease_id, safe='')}"


def _unknown(reports: Sequence[PoolReport], text: str) -> str:
    message = f"there is no lease {plain(text)}; `gpu-pool leases` lists those there are"
    down = [f"{report.endpoint} is down ({report.error})" for report in reports if not report.is_up]
    without = [f"{report.endpoint} has statistics only, no leases" for report in reports if not report.has_leases]
    beside = "; ".join([*down, *without])
    return f"{message}. {beside}" + (", so it may be there" if down else "") if beside else message
