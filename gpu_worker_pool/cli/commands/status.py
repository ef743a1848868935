"""`gpu-pool status`: which lease has which GPU, and which requests wait."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Final

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.live import draw_until_quit
from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json, Mine
from gpu_worker_pool.cli.output import Console, Text, out
from gpu_worker_pool.cli.pools.plans import Plan, show_plan
from gpu_worker_pool.cli.pools.reading import ask_names, ask_pools
from gpu_worker_pool.cli.pools.report import (
    GpuReport,
    LeaseReport,
    PoolReport,
    by_node,
    check_any_is_up,
    fleet_line,
    only_of,
    show_clock,
    show_holding,
    show_outsiders,
)
from gpu_worker_pool.cli.pools.servers import Servers, print_answers
from gpu_worker_pool.cli.pools.terms import show_start, show_terms
from gpu_worker_pool.cli.table import Table, cut, make_table, print_table
from gpu_worker_pool.cli.units import count, parse_duration_s
from gpu_worker_pool.wire.same_server import same_pool

# The waiting requests that are shown; `leases` lists all.
MOST_QUEUED: Final = 20
MOST_BOOKINGS: Final = 10
BAR_CELLS: Final = 10
SHORTEST_INTERVAL_S: Final = 0.1
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


def _interval_s(text: str) -> float:
    seconds = parse_duration_s(text)
    if seconds < SHORTEST_INTERVAL_S:
        raise ValueError(f"{text!r} is too short; {SHORTEST_INTERVAL_S:g}s is the shortest")
    return seconds


Watch = Annotated[bool, Option("--watch", "-w", help="Follow the pool until q or Ctrl-C; top does the same.")]
Interval = Annotated[
    float, Option("--interval", "-i", parser=_interval_s, metavar="TIME", help="With --watch: how often. [1s]")
]


def status(
    endpoint: Endpoints = None,
    *,
    mine: Mine = False,
    watch: Watch = False,
    interval: Interval = 1.0,
    fleet: FleetScope = False,
    json: Json = False,
) -> None:
    """Show every GPU, who holds it since when, and who waits.

    A server that is down is shown as down. Ends with 0 if at least one answered, else with 125.
    """
    servers = Servers(endpoint, is_fleet=fleet)
    if watch and not json:
        follow(servers, interval, is_mine=mine)
        return
    while True:
        reports = servers.run(lambda opened: _ask(opened, is_whole=json, is_mine=mine))
        check_any_is_up(reports)
        if json:
            print_answers(reports)
        else:
            show(out(), reports, time.time())
        if not watch:
            return
        time.sleep(interval)


async def _ask(servers: Servers, *, is_whole: bool, is_mine: bool) -> list[PoolReport]:
    """The pools. Of a long queue only the beginning is asked for, unless all of it is wanted."""
    if not is_mine:
        return await ask_pools(servers, "" if is_whole else f"?queue={MOST_QUEUED}")
    reports = await ask_pools(servers)
    names = await ask_names(servers) if any(report.is_up for report in reports) else {}
    return [only_of(report, names.get(report.endpoint)) for report in reports]


def top(endpoint: Endpoints = None, *, interval: Interval = 1.0, fleet: FleetScope = False, json: Json = False) -> None:
    """Follow the pool, as `status --watch` does. q or Ctrl-C ends it.

    Without a terminal it is printed once. With --json, one object on a line each interval, until Ctrl-C.
    """
    status(endpoint, watch=json or sys.stdout.isatty(), interval=interval, fleet=fleet, json=json)


def follow(servers: Servers, interval_s: float, *, is_mine: bool) -> None:
    """Draw on the whole screen what `status` shows, again and again. A server that is down is shown so."""
    console = out()

    def draw() -> list[str]:
        reports = servers.run(lambda opened: _ask(opened, is_whole=False, is_mine=is_mine))
        now, drawn = time.time(), io.StringIO()
        page = Console(drawn, is_terminal=True, width=console.width)
        page.print(f"{datetime.fromtimestamp(now).astimezone():%H:%M:%S}  every {interval_s:g} s, q quits", "dim")
        show(page, reports, now)
        return drawn.getvalue().splitlines()

    if console.is_terminal:
        draw_until_quit(console, draw, interval_s)
    else:
        console.write("\n".join([*draw()[1:], ""]))


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
        console.print(show_plan(plan, now))
    if (more := len(report.bookings) - MOST_BOOKINGS) > 0:
        console.print(f"and {more} more; `gpu-pool reservations` lists all")


def _show_gpus(console: Console, report: PoolReport, now: float) -> None:
    if (line := fleet_line(report)) is not None:
        console.print(line)
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
    is_ascii = console.is_ascii
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
