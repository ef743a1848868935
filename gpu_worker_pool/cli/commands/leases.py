"""`gpu-pool leases`: every lease that holds a GPU or waits for one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from os.path import commonprefix
from typing import Annotated

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json, Mine
from gpu_worker_pool.cli.output import Console, Text, complain, out, print_body
from gpu_worker_pool.cli.pools.lease_search import ask_pools_or_fail
from gpu_worker_pool.cli.pools.reading import ask_names
from gpu_worker_pool.cli.pools.report import LeaseReport, PoolReport, distinct_leases
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.pools.terms import short_start, show_terms
from gpu_worker_pool.cli.table import Table, cut, make_table, print_table
from gpu_worker_pool.cli.units import show_moment


class LiveState(StrEnum):
    ACTIVE = "active"
    DRAINING = "draining"
    QUEUED = "queued"


def leases(
    endpoint: Endpoints = None,
    *,
    mine: Mine = False,
    state: Annotated[
        list[LiveState] | None,
        Option(
            "--state", metavar="STATE", help="Only those in this state: active, draining or queued; repeat it for more."
        ),
    ] = None,
    wide: Annotated[bool, Option("--wide", help="Show worker ids, hosts and processes too.")] = False,
    fleet: FleetScope = False,
    json: Json = False,
) -> None:
    """List all leases: those that hold GPUs, those whose processes are still leaving, and those that wait.

    On a terminal ids are shortened to a beginning that `release` and `explain` take.
    """

    async def ask(servers: Servers) -> tuple[list[PoolReport], dict[str, str]]:
        return await ask_pools_or_fail(servers), await ask_names(servers) if mine else {}

    reports, names = Servers(endpoint, is_fleet=fleet).run(ask)
    live = distinct_leases(reports)
    found = [
        lease
        for lease in live
        if (not state or lease.view.state in state) and (not mine or lease.view.owner == names.get(lease.endpoint))
    ]
    for report in reports:
        if not report.is_up:
            complain(f"{report.endpoint} is down, its leases are not shown: {report.error}")
        elif not report.has_leases:
            complain(f"{report.endpoint} has statistics only, no leases")
    if json:
        several = len(reports) > 1
        print_body({"leases": [{**({"endpoint": lease.endpoint} if several else {}), **lease.body} for lease in found]})
        return
    if not found:
        complain("there are no such leases" if mine or state else "nobody holds a GPU, nobody waits")
        return
    console = out()
    ids = [lease.id for lease in live]
    shown = short_ids(ids) if console.is_terminal else dict(zip(ids, ids, strict=True))
    print_table(console, _table(console, found, shown, with_endpoint=len(reports) > 1, is_wide=wide), is_whole=wide)


def _table(
    console: Console, found: Sequence[LeaseReport], ids: Mapping[str, str], *, with_endpoint: bool, is_wide: bool
) -> Table:
    now = time.time()
    notes = [_notes(lease, now) for lease in found]
    headings = ["ID", "STATE", *(["SERVER"] if with_endpoint else []), "OWNER", "GPUS", "SINCE", "PRIORITY"]
    headings += [*(["NOTES"] if any(notes) else []), "COMMAND"]
    headings += ["WORKER", "HOST", "PID"] if is_wide else []
    table = make_table(*headings, whole=("ID", "STATE", "SINCE", "PRIORITY"))
    for lease, note in zip(found, notes, strict=True):
        view = lease.view
        table.add_row(
            ids[lease.id],
            view.state,
            *([lease.endpoint] if with_endpoint else []),
            view.owner or "-",
            ", ".join(lease.gpu_ids) or f"waits for {lease.wants}",
            show_moment(lease.since_at, now),
            str(view.priority),
            *([note] if "NOTES" in headings else []),
            Text(cut(console, lease.command or "-")),
            *(str(fact or "-") for fact in ((view.worker_id, view.host, view.pid) if is_wide else ())),
        )
    return table


def _notes(lease: LeaseReport, now: float) -> str:
    start = short_start(lease.view, now)
    return ", ".join([*([f"starts {start}"] if start else []), *show_terms(lease.view, now)])


def short_ids(ids: Sequence[str], at_least: int = 8) -> dict[str, str]:
    """Each id by its shortest unique beginning, of at least this many characters."""
    ordered = sorted(set(ids))
    # Ids are compared character by character, as is wanted here.
    shared = [0, *(len(commonprefix(pair)) for pair in itertools.pairwise(ordered)), 0]  # noqa: RUF071
    return {
        id_: id_[: max(at_least, before + 1, after + 1)]
        for id_, (before, after) in zip(ordered, itertools.pairwise(shared), strict=True)
    }
