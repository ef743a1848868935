"""`gpu-pool report`: who used the GPUs, and for how long."""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import complain, out, print_body
from gpu_worker_pool.cli.pools.servers import ask_one, read_answer
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.cli.units import count, parse_moment, show_duration
from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.wire.accounting import UsageTotal, UsageView

DEFAULT_SPAN_S: Final = 24 * 3600.0
# A server with a million leases to add up takes a while.
ANSWER_S: Final = 30.0
LIMIT_VARIABLE: Final = "GPU_ENDPOINT_TIMEOUT"
NOBODY: Final = "(no owner)"
# What is known of each owner, as the server's documentation of /usage has it.
COLUMNS: Final = tuple(item.name for item in fields(UsageTotal))


def report(
    since: Annotated[
        str | None,
        Option(
            metavar="7d|2026-11-01",
            help="From when: 7d (ago), or a local date or time. By default a day before --until.",
        ),
    ] = None,
    until: Annotated[
        str | None, Option(metavar="1d|2026-12-01", help="Until when, in the same form. By default now.")
    ] = None,
    *,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV: a header, then a line for each owner.")] = False,
    json: Json = False,
    endpoint: Endpoints = None,
) -> None:
    """Add up GPU-hours by owner; in a fleet, those of all its boxes.

    Two GPUs for an hour are two GPU-hours; a lease that still runs counts until now. Leases that share a GPU are counted
    separately.
    """
    if as_csv and json:
        raise Failure("--csv and --json cannot be combined; choose one", USAGE)
    now = time.time()
    until_at = None if until is None else parse_moment(until, now, "--until", is_past=True)
    if until_at is not None and until_at >= now:
        until_at = None  # there is nothing to report of the future
    end_at = now if until_at is None else until_at
    since_at = max(end_at - DEFAULT_SPAN_S, 0.0) if since is None else parse_moment(since, now, "--since", is_past=True)
    if since_at >= end_at:
        end = "now" if until_at is None else f"--until ({_show_time(until_at)})"
        raise Failure(f"--since ({_show_time(since_at)}) must be before {end}", USAGE)
    path = f"/usage?since={since_at:.3f}" + ("" if until_at is None else f"&until={until_at:.3f}")
    # A limit that the user sets comes before ours.
    timeout_s = None if os.environ.get(LIMIT_VARIABLE, "").strip() else ANSWER_S
    answer = ask_one(endpoint, path, what="there is no report", is_fleet=True, timeout_s=timeout_s)
    view = read_answer(UsageView, answer, "owners")
    if not view.is_complete:
        complain(f"some leases that ended before {view.complete_since} are missing from these sums")
    if view.source == "simulated":
        complain("these GPUs are simulated")
    if view.total.unknown_leases or view.total.unknown_waits:
        complain(
            f"{view.total.unknown_leases} leases and {view.total.unknown_waits} waits are not in these sums: a clock was "
            "changed while they lasted, so their length is not known"
        )
    if json:
        print_body(answer.data)
    elif as_csv:
        _print_csv(view)
    else:
        _print_table(view, since_at, until_at)


def _rows(view: UsageView) -> Iterator[tuple[str, UsageTotal]]:
    for usage in view.owners:
        yield usage.owner or "", usage
    if view.others is not None:
        yield f"({view.others.owners} others)", view.others


def _print_csv(view: UsageView) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("owner", *COLUMNS))
    for owner, usage in _rows(view):
        amounts = (getattr(usage, name) for name in COLUMNS)
        # Not as 4e-06, which not every program takes for a number.
        writer.writerow((_as_text(owner), *(f"{item:.6f}" if isinstance(item, float) else item for item in amounts)))
    sys.stdout.flush()


def _as_text(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _print_table(view: UsageView, since_at: float, until_at: float | None) -> None:
    console = out()
    end = "now" if until_at is None else _show_time(until_at)
    console.print(f"From {_show_time(since_at)} to {end}", style="dim")
    rows, total = [(owner or NOBODY, usage) for owner, usage in _rows(view)], view.total
    if not rows:
        complain("nobody held a GPU or waited for one")
        return
    columns = [each for each in _COLUMNS if each.is_always or getattr(total, each.name)]
    headings = [each.heading for each in columns]
    table = make_table("OWNER", *headings, whole=headings, right=headings)
    for name, usage in [*rows, ("TOTAL", total)] if len(rows) > 1 else rows:
        table.add_row(name, *(each.show(getattr(usage, each.name)) for each in columns))
    print_table(console, table)
    for usage in view.groups:
        hours = f"{_show_hours(usage.gpu_hours + usage.shared_gpu_hours)} GPU-hours in {count(usage.leases, 'lease')}"
        console.print(f"group {usage.owner}: {hours}")


def _show_hours(hours: float) -> str:
    return "<0.01" if 0 < hours < 0.005 else f"{hours:.2f}"


def _show_time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M %Z")


class _Column(NamedTuple):
    """One figure of an owner; a column is left out where nobody has any, unless it is shown always."""

    heading: str
    name: str
    show: Callable[[Any], str] = str
    is_always: bool = False


def _show_span(hours: float) -> str:
    return show_duration(hours * 3600)


_COLUMNS: Final = (
    _Column("GPU-HOURS", "gpu_hours", _show_hours, is_always=True),
    _Column("SHARED", "shared_gpu_hours", _show_hours),
    _Column("LEASES", "leases", is_always=True),
    _Column("RUNNING", "running", is_always=True),
    _Column("LONGEST", "longest_hours", _show_span, is_always=True),
    _Column("WAITED", "wait_hours", _show_span, is_always=True),
    _Column("UNKNOWN", "unknown_leases"),
    # The leases that the server ended, by why.
    _Column("TIME LIMIT", "time_limit_ends"),
    _Column("PREEMPTED", "preempted_ends"),
    _Column("IDLE", "idle_ends"),
)
