"""`gpu-pool status`: is there a GPU now, which lease has which GPU, and which requests wait."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final, NamedTuple

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.live import draw_until_quit
from gpu_worker_pool.cli.options import Endpoints, Json, Mine
from gpu_worker_pool.cli.output import Console, Text, out, print_body
from gpu_worker_pool.cli.pools.forecast import forecast_line
from gpu_worker_pool.cli.pools.reading import ask_names, ask_pools
from gpu_worker_pool.cli.pools.report import (
    LeaseReport,
    PoolReport,
    check_any_is_up,
    describe_group,
    only_of,
    short_start,
    show_booking,
    show_clock,
    show_holding,
    show_outsiders,
    show_reservation,
    show_start,
    show_terms,
)
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.table import Table, cut, make_table, print_table
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.wire.pool import PoolGpu

# The waiting requests that are shown; `leases` lists all.
MOST_QUEUED: Final = 20
MOST_BOOKINGS: Final = 10
BAR_CELLS: Final = 10
INTERVAL_S: Final = 1.0
# On a narrower terminal the bars are left out: the holders need the room.
_WIDE: Final = 110
# Colours mean the same as on the page (KIND_OF in server/ui/page/pool.js).
_KIND_STYLES: Final = {
    "green": ("free",),
    "blue": ("leased", "shared", "held"),
    "yellow": ("draining", "busy", "outside"),
    "bold red": ("unhealthy",),
    "dim": ("out_of_service", "unknown"),
}
STATE_STYLES: Final = {state: style for style, states in _KIND_STYLES.items() for state in states}
# In these states the holder says why; in the others the reason does.
SAID_BY_HOLDERS: Final = frozenset({"free", "leased", "shared"})
_GPU_HEADINGS: Final = ("GPU", "MODEL", "STATE", "MEMORY", "UTIL")
_TROUBLE: Final = "bold red"


class PoolsSeen(NamedTuple):
    """What the servers show. `forecast` is what a request that is made now may expect."""

    reports: Sequence[PoolReport]
    forecast: str | None = None


def status(
    endpoint: Endpoints = None,
    *,
    mine: Mine = False,
    why: Annotated[bool, Option("--why", help="Say why each request waits.")] = False,
    watch: Annotated[
        bool, Option("--watch", "-w", help="Follow the pool until q or Ctrl-C; top does the same.")
    ] = False,
    fleet: Annotated[bool, Option("--fleet", help="The whole fleet, not only the server's own box.")] = False,
    json: Json = False,
) -> None:
    """Show whether a GPU is free or when one will be, who holds which GPU, and who waits.

    A server that is down is shown as down. Ends with 0 if at least one answered, else with 125.
    """
    if watch and json:
        raise Failure("--watch and --json cannot be combined; leave one out", USAGE)
    servers = Servers(endpoint, is_fleet=fleet)
    if watch and out().is_terminal:
        _follow(servers, is_mine=mine, has_why=why)
        return
    seen = servers.run(lambda opened: _ask(opened, is_whole=json, is_mine=mine))
    check_any_is_up(seen.reports)
    if json:
        _print_json(seen.reports)
    else:
        show(out(), seen, time.time(), has_why=why)


def _print_json(reports: Sequence[PoolReport]) -> None:
    """What the server answered; of several, each with its `endpoint`, `url`, `error` and `same_as`."""
    bodies = [report.answer.data if report.is_up else {} for report in reports]
    if len(reports) == 1:
        print_body(bodies[0])
        return
    about = ({name: getattr(each, name) for name in ("endpoint", "url", "error", "same_as")} for each in reports)
    print_body({"endpoints": [{**facts, **body} for facts, body in zip(about, bodies, strict=True)]})


async def _ask(servers: Servers, *, is_whole: bool, is_mine: bool) -> PoolsSeen:
    """The pools. Of a long queue only the beginning is asked for, unless all of it is wanted."""
    reports = await ask_pools(servers, "" if is_whole or is_mine else f"?queue={MOST_QUEUED}")
    forecast = None if is_whole else await forecast_line(servers, reports, time.time())
    if not is_mine:
        return PoolsSeen(reports, forecast)
    names = await ask_names(servers) if any(report.is_up for report in reports) else {}
    return PoolsSeen([only_of(report, names.get(report.endpoint)) for report in reports], forecast)


def _follow(servers: Servers, *, is_mine: bool, has_why: bool) -> None:
    """Draw on the whole screen what `status` shows, again and again. A server that is down is shown so."""
    console = out()

    def draw() -> list[str]:
        seen = servers.run(lambda opened: _ask(opened, is_whole=False, is_mine=is_mine))
        now, drawn = time.time(), io.StringIO()
        page = Console(drawn, is_terminal=True, width=console.width)
        page.print(f"{datetime.fromtimestamp(now).astimezone():%H:%M:%S}  q quits", "dim")
        show(page, seen, now, has_why=has_why)
        return drawn.getvalue().splitlines()

    draw_until_quit(console, draw, INTERVAL_S)


def show(console: Console, seen: PoolsSeen, now: float, *, has_why: bool = False) -> None:
    if seen.forecast is not None:
        console.print(seen.forecast, "bold")
    for number, report in enumerate(seen.reports):
        if number:
            console.print()
        _show_pool(console, report, now, has_why=has_why)


def _show_pool(console: Console, report: PoolReport, now: float, *, has_why: bool) -> None:
    view = report.view
    console.print(_heading(report))
    if report.error is not None or report.same_as is not None:
        return
    if view.can_grant is False:
        console.print(Text(f"nothing can be granted: {view.trouble or 'the server does not say why'}", _TROUBLE))
    if not report.has_leases:
        console.print(
            "This server has statistics only: it does not know who holds a GPU, and free means below the thresholds."
        )
    _show_gpus(console, report, now)
    if not report.has_leases:
        return
    hint = "; --why says why" if report.queue and not has_why else ""
    console.print(f"{count(len(report.leases), 'lease')}, {report.queue_length or 'nobody'} waiting{hint}")
    if report.queue:
        print_table(console, _queue_table(console, report.queue, now, has_why=has_why))
    if (more := report.queue_length - len(report.queue)) > 0:
        console.print(f"and {more} more; `gpu-pool jobs --all` lists all")
    if view.reservation is not None:
        console.print(f"{report.naming.show(view.reservation.gpus)} {show_reservation(view.reservation, now)}")
    for booking in view.bookings[:MOST_BOOKINGS]:
        console.print(f"{report.naming.show(booking.gpus)} {show_booking(booking, now)}")
    for group in view.groups:
        console.print(f"group {group.name}: {describe_group(group)}")
    if (more := len(view.bookings) - MOST_BOOKINGS) > 0:
        console.print(f"and {more} more; `gpu-pool reserve` lists all")


def _show_gpus(console: Console, report: PoolReport, now: float) -> None:
    if (line := _fleet_line(report)) is not None:
        console.print(line)
    nodes: dict[str, list[PoolGpu]] = {}
    for gpu in report.view.gpus:
        nodes.setdefault(gpu.node or "", []).append(gpu)
    for node, gpus in sorted(nodes.items()):
        if len(nodes) > 1:
            free = sum(gpu.state == "free" for gpu in gpus)
            console.print(Text.assemble((node, "bold"), f": {count(len(gpus), 'GPU')}, {free} free"))
        print_table(console, _gpu_table(console, report, gpus, now))
    if not nodes:
        console.print("It shows no GPUs.")


def _fleet_line(report: PoolReport) -> str | None:
    """Which fleet a pool belongs to, who leads it, and how to see all of it; None where it belongs to none."""
    fleet = report.view.fleet
    if fleet is None:
        return None
    led = f"led by {fleet.leader}" if fleet.leader else "no leader at the moment"
    name = "a fleet that it does not know yet" if fleet.id is None else f"fleet {fleet.id[:8]}"
    if report.view.node is None:
        return f"All boxes of {name}, {led}; `gpu-pool fleet` lists them"
    return f"A box of {name}, {led}; --fleet shows all of it"


def _heading(report: PoolReport) -> Text:
    heading = Text.assemble((report.endpoint, "bold"), f" {report.url}")
    if report.error is not None:
        return heading.append(": ").append(
            f"{'down' if report.status is None else 'cannot be used'}: {report.error}", _TROUBLE
        )
    if report.same_as is not None:
        # Without a node it was asked for its fleet.
        what = "a box of the same fleet as" if report.view.node is None else "the same server as"
        return heading.append(f": {what} {report.same_as}")
    can_grant, gpus = report.view.can_grant is not False, report.view.gpus
    free = sum(gpu.state == "free" for gpu in gpus) if can_grant else 0
    heading.append(f": {count(len(gpus), 'GPU')}, {free} free")
    if report.view.source == "simulated":
        heading.append(", ").append("simulated", "bold")
    return heading


def _gpu_table(console: Console, report: PoolReport, gpus: Sequence[PoolGpu], now: float) -> Table:
    table = make_table(*_GPU_HEADINGS, "HELD BY / REASON", whole=_GPU_HEADINGS)
    has_room = not console.is_terminal or console.width >= _WIDE
    for gpu in gpus:
        name = report.naming.id_of(gpu)
        # Without words that the heading says or that every model has.
        model = (gpu.name or "unknown").removeprefix("Simulated ").removeprefix("NVIDIA ")
        said = [show_holding(lease, now, cut(console, lease.command or "")) for lease in report.holders(gpu)]
        outside = [f"outside the pool: {process}" for process in show_outsiders(gpu)]
        if gpu.state not in SAID_BY_HOLDERS:
            said.append((gpu.reason or "the server does not say why").removeprefix("taken out of service: "))
        first, *others = [*said, *outside] or [""]
        table.add_row(
            name,
            model,
            Text(gpu.state.replace("_", " "), STATE_STYLES.get(gpu.state, "")),
            _memory(gpu, has_bar=has_room, is_ascii=console.is_ascii),
            _percent(gpu.utilization_percent),
            first,
        )
        # A row for each: at any width, each holder stands beside what it runs.
        for other in others:
            table.add_row(name, "", "", "", "", other)
    return table


def _queue_table(console: Console, queue: Sequence[LeaseReport], now: float, *, has_why: bool) -> Table:
    """A line for each waiter; with its reason, as many as that needs."""
    because = ["BECAUSE"] if has_why else []
    table = make_table(
        "#", "OWNER", "COMMAND", "WANTS", "SINCE", "STARTS", *because, whole=("#", "OWNER", "SINCE", "STARTS")
    )
    for lease in queue:
        priority = [f"priority {lease.view.priority}"] if lease.view.priority else []
        table.add_row(
            "?" if lease.view.position is None else str(lease.view.position),
            Text(lease.holder, is_line=True),
            Text(cut(console, lease.command or "-"), is_line=not has_why),
            Text(", ".join([lease.wants, *priority, *show_terms(lease.view, now)]), is_line=not has_why),
            show_clock(lease.requested_at, now).removeprefix("since "),
            short_start(lease.view, now) or "-",
            *([Text("; ".join(filter(None, (lease.why, show_start(lease.view, now)))))] if has_why else []),
        )
    return table


def _memory(gpu: PoolGpu, *, has_bar: bool, is_ascii: bool) -> Text:
    if not gpu.memory_total_mb or gpu.memory_used_mb is None:
        return _percent(None)
    percent = 100 * gpu.memory_used_mb / gpu.memory_total_mb
    if not has_bar:
        return _percent(percent)
    filled = min(max(round(percent / 100 * BAR_CELLS), 0), BAR_CELLS)
    full, empty = ("#", "-") if is_ascii else ("█", "░")
    return Text.assemble((full * filled, "cyan"), (empty * (BAR_CELLS - filled), "dim"), f" {percent:.0f}%")


def _percent(value: float | None) -> Text:
    return Text("unknown", "dim") if value is None else Text(f"{value:.0f}%")
