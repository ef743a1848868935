"""`gpu-pool status`: which lease has which GPU, and which requests wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json
from gpu_worker_pool.cli.output import out, print_json
from gpu_worker_pool.cli.pools.plans import Plan, show_plan
from gpu_worker_pool.cli.pools.reading import ask_pools
from gpu_worker_pool.cli.pools.report import (
    GpuReport,
    LeaseReport,
    PoolReport,
    by_node,
    check_any_is_up,
    fleet_line,
    show_clock,
    show_holding,
    show_outsiders,
)
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.pools.terms import show_start, show_terms
from gpu_worker_pool.cli.table import cut, make_table, print_table
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.wire.same_server import same_pool

# So many waiting requests are shown; `leases` lists all.
MOST_QUEUED: Final = 20
MOST_BOOKINGS: Final = 10
BAR_CELLS: Final = 10
# On a narrower terminal the bars are left out: the holders need the room.
_WIDE: Final = 110
STATE_STYLES: Final = {
    "free": "green",
    "leased": "yellow",
    "shared": "yellow",
    "held": "blue",
    "draining": "magenta",
    "busy": "red",
    "outside": "red",
    "out_of_service": "bold magenta",
    "unhealthy": "bold red",
    "unknown": "dim",
}
# In these states the holder says why; in the others the reason does.
SAID_BY_HOLDERS: Final = frozenset({"free", "leased", "shared"})
_GPU_HEADINGS: Final = ("GPU", "MODEL", "STATE", "MEMORY", "UTIL")
_TROUBLE: Final = "bold red"


def status(endpoint: Endpoints = None, *, fleet: FleetScope = False, json: Json = False) -> None:
    """Show every GPU, who holds it since when, and who waits.

    A server that is down is shown as down. Ends with 0 if at least one answered, else with 125.
    """
    query = "" if json else f"?queue={MOST_QUEUED}"
    reports = Servers(endpoint, is_fleet=fleet).run(lambda servers: ask_pools(servers, query))
    check_any_is_up(reports)
    if not json:
        show(out(), reports, time.time())
        return
    counted = [report for report in reports if report.same_as is None]
    totals = {"gpus_total": sum(len(item.gpus) for item in counted), "gpus_free": sum(item.free for item in counted)}
    print_json("status", {**totals, "endpoints": [report.as_json() for report in reports]})


def show(console: Console, reports: Sequence[PoolReport], now: float) -> None:
    for number, report in enumerate(reports):
        if number:
            console.print()
        _show_pool(console, report, now)


def _show_pool(console: Console, report: PoolReport, now: float) -> None:
    console.print(_heading(report))
    if report.error is not None or report.same_as is not None:
        return
    if report.view.can_grant is False:
        why = report.view.trouble or "the server does not say why"
        console.print(Text(f"nothing can be granted: {why}", _TROUBLE))
    if not report.has_leases:
        console.print(
            "It has statistics only, no leases: who holds a GPU is not known, and free is what is below the thresholds."
        )
    _show_gpus(console, report, now)
    if not report.has_leases:
        return
    leases = count(len(report.leases), "lease")
    console.print(f"{leases}, {report.queue_length or 'nobody'} waiting")
    if report.queue:
        print_table(console, _queue_table(console, report.queue, now))
    if (more := report.queue_length - len(report.queue)) > 0:
        console.print(f"and {more} more; `gpu-pool leases --state queued` lists all")
    plans: list[Plan] = [*([report.reservation] if report.reservation else []), *report.bookings[:MOST_BOOKINGS]]
    for plan in plans:
        console.print(show_plan(plan, now), markup=False)
    if (more := len(report.bookings) - MOST_BOOKINGS) > 0:
        console.print(f"and {more} more; `gpu-pool reservations` lists all")


def _show_gpus(console: Console, report: PoolReport, now: float) -> None:
    if (line := fleet_line(report)) is not None:
        console.print(line, markup=False)
    leases = {lease.id: lease for lease in report.leases}
    for node, gpus in by_node(report):
        if node is not None:
            free = sum(gpu.view.state == "free" for gpu in gpus)
            console.print(Text.assemble((node, "bold"), f": {count(len(gpus), 'GPU')}, {free} free"))
        print_table(console, _gpu_table(console, leases, gpus, now))
    if not report.gpus:
        console.print("It shows no GPUs.")


def _heading(report: PoolReport) -> Text:
    heading = Text.assemble((report.endpoint, "bold"), f" {report.url}")
    if report.error is not None:
        return heading.append(": ").append(
            f"{'down' if report.status is None else 'cannot be used'}: {report.error}", _TROUBLE
        )
    if report.same_as is not None:
        return heading.append(f": {same_pool(report.same_as, report.view.node)}")
    heading.append(f": {count(len(report.gpus), 'GPU')}, {report.free} free")
    if report.is_simulated:
        heading.append(", ").append("simulated", "bold")
    return heading


def _gpu_table(console: Console, leases: Mapping[str, LeaseReport], gpus: Sequence[GpuReport], now: float) -> Table:
    is_ascii = console.options.ascii_only
    table = make_table(*_GPU_HEADINGS, "HELD BY / REASON", whole=_GPU_HEADINGS)
    has_room = not console.is_terminal or console.width >= _WIDE
    for gpu in gpus:
        view = gpu.view
        # Without words that the heading says or that every model has.
        model = (view.name or "unknown").removeprefix("Simulated ").removeprefix("NVIDIA ")
        holders = [leases[lease_id] for lease_id in view.leases if lease_id in leases]
        said = [show_holding(lease, now, cut(console, lease.command or "")) for lease in holders]
        outside = [f"outside the pool: {process}" for process in show_outsiders(view)]
        if view.state not in SAID_BY_HOLDERS:
            said.append(view.reason or "the server does not say why")
        first, *others = [*said, *outside] or [""]
        table.add_row(
            Text(gpu.id),
            Text(model),
            Text(view.state.replace("_", " "), STATE_STYLES.get(view.state, "")),
            _memory(gpu, has_bar=has_room, is_ascii=is_ascii),
            _percent(view.utilization_percent),
            Text(first),
        )
        # A row for each: at any width, each holder stands beside what it runs.
        for other in others:
            table.add_row(Text(gpu.id), "", "", "", "", Text(other))
    return table


def _queue_table(console: Console, queue: Sequence[LeaseReport], now: float) -> Table:
    table = make_table("POSITION", "OWNER", "COMMAND", "WANTS", "SINCE", "BECAUSE", whole=("POSITION", "SINCE"))
    for lease in queue:
        priority = [f"priority {lease.view.priority}"] if lease.view.priority else []
        table.add_row(
            "?" if lease.view.position is None else str(lease.view.position),
            Text(lease.holder),
            Text(cut(console, lease.command or "-")),
            Text(", ".join([lease.wants, *priority, *show_terms(lease.view, now)])),
            show_clock(lease.requested_at, now).removeprefix("since "),
            Text("; ".join(part for part in (lease.why, show_start(lease.view, now)) if part)),
        )
    return table


def _memory(gpu: GpuReport, *, has_bar: bool, is_ascii: bool) -> Text:
    if gpu.memory_percent is None:
        return Text("unknown", "dim")
    if not has_bar:
        return Text(f"{gpu.memory_percent:.0f}%")
    filled = min(max(round(gpu.memory_percent / 100 * BAR_CELLS), 0), BAR_CELLS)
    full, empty = ("#", "-") if is_ascii else ("█", "░")
    return Text.assemble((full * filled, "cyan"), (empty * (BAR_CELLS - filled), "dim"), f" {gpu.memory_percent:.0f}%")


def _percent(value: float | None) -> Text:
    return Text("unknown", "dim") if value is None else Text(f"{value:.0f}%")
