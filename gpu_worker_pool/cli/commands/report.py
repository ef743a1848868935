"""`gpu-pool report`: who used the GPUs, and for how long."""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Final

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json
from gpu_worker_pool.cli.output import complain, out
from gpu_worker_pool.cli.pools.servers import Servers, print_answers
from gpu_worker_pool.cli.pools.usage import COLUMNS, UsageReport, amounts, ask_usage
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.cli.units import parse_moment, show_duration
from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.wire.accounting import UsageTotal
from gpu_worker_pool.wire.same_server import same_pool

DEFAULT_SPAN_S: Final = 24 * 3600.0
# A server with a million leases to add up takes a while. A limit that the user sets comes first.
ANSWER_S: Final = 30.0
LIMIT_VARIABLE: Final = "GPU_ENDPOINT_TIMEOUT"
NOBODY: Final = "(no owner)"
# The leases that the server ended, by why; a column is shown only if there are some.
_ENDS: Final = (("TIME LIMIT", "time_limit_ends"), ("PREEMPTED", "preempted_ends"), ("IDLE", "idle_ends"))


def report(
    since: Annotated[
        str | None,
        Option(
            metavar="7d|2026-11-01",
            help="The beginning: 7d ago, or a date or time of your time zone. By default a day before --until.",
        ),
    ] = None,
    until: Annotated[str | None, Option(metavar="1d|2026-12-01", help="The end, likewise. By default now.")] = None,
    *,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV: a line with the names, then one an owner.")] = False,
    fleet: FleetScope = False,
    json: Json = False,
    endpoint: Endpoints = None,
) -> None:
    """Add up GPU-hours by owner.

    Two GPUs for an hour are two GPU-hours; a lease that still runs counts until now. Leases that share a GPU are counted
    separately. Of several servers the sums are added; one that does not answer is named. Ends with 125 if none has
    anything to report.
    """
    if as_csv and json:
        raise Failure("--csv and --json exclude each other; choose one", USAGE)
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
    servers = Servers(endpoint, timeout_s=limit_s(os.environ), is_fleet=fleet)
    found = servers.run(lambda servers: ask_usage(servers, path))
    _warn(found)
    if json:
        print_answers(found.servers)
    elif as_csv:
        _print_csv(found)
    else:
        _print_table(found, since_at, until_at)


def limit_s(environ: Mapping[str, str]) -> float | None:
    """How long a server may take; None where the user sets a limit."""
    return None if environ.get(LIMIT_VARIABLE, "").strip() else ANSWER_S


def _warn(found: UsageReport) -> None:
    for server in found.servers:
        if server.error is not None:
            complain(f"{server.endpoint} ({server.url}) is missing in these sums: {server.error}")
        elif server.same_as is not None:
            complain(
                f"{server.endpoint} is {same_pool(server.same_as, server.view.node if server.view else None)}; it is counted once"
            )
        elif server.view is not None and not server.view.is_complete:
            complain(
                f"{server.endpoint} knows only leases that ended after {server.view.complete_since}; of those before, some "
                "are missing in these sums"
            )
        if server.counted is not None and server.source == "simulated":
            complain(f"the GPUs of {server.endpoint} are simulated")
    for boxes in found.boxes_of_one_fleet():
        complain(
            f"{', '.join(boxes)} are boxes of one fleet: a lease on several of them is counted at each; --fleet counts it once"
        )
    total = found.total()
    if total.unknown_leases or total.unknown_waits:
        complain(
            f"{total.unknown_leases} leases and {total.unknown_waits} waits are not in these sums: a clock was set meanwhile, so "
            "how long they took is not known"
        )


def _rows(found: UsageReport) -> Iterator[tuple[str, UsageTotal]]:
    for owner, usage in found.by_owner():
        yield owner or "", usage
    if others := found.others():
        yield f"({others[0]} others)", others[1]


def _print_csv(found: UsageReport) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("owner", *COLUMNS))
    for owner, usage in _rows(found):
        # Not as 4e-06, which not every program takes for a number.
        cells = amounts(usage).values()
        writer.writerow((_as_text(owner), *(f"{item:.6f}" if isinstance(item, float) else item for item in cells)))
    sys.stdout.flush()


def _as_text(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _print_table(found: UsageReport, since_at: float, until_at: float | None) -> None:
    console = out()
    end = "now" if until_at is None else _show_time(until_at)
    console.print(f"From {_show_time(since_at)} to {end}", style="dim")
    rows, total = [(owner or NOBODY, usage) for owner, usage in _rows(found)], found.total()
    if not rows:
        complain("nobody held a GPU or waited for one")
        return
    is_shared, has_unknown = total.shared_gpu_hours > 0, total.unknown_leases > 0
    headings = ["GPU-HOURS", *(["SHARED"] if is_shared else []), "LEASES", "RUNNING", "LONGEST", "WAITED"]
    headings += ["UNKNOWN"] if has_unknown else []
    ends = [(word, name) for word, name in _ENDS if getattr(total, name)]
    headings += [word for word, _ in ends]
    table = make_table("OWNER", *headings, whole=headings, right=headings)
    for name, usage in [*rows, ("TOTAL", total)] if len(rows) > 1 else rows:
        table.add_row(
            name,
            _show_hours(usage.gpu_hours),
            *([_show_hours(usage.shared_gpu_hours)] if is_shared else []),
            str(usage.leases),
            str(usage.running),
            show_duration(usage.longest_hours * 3600),
            show_duration(usage.wait_hours * 3600),
            *([str(usage.unknown_leases)] if has_unknown else []),
            *(str(getattr(usage, name)) for _, name in ends),
        )
    print_table(console, table)


def _show_hours(hours: float) -> str:
    return "<0.01" if 0 < hours < 0.005 else f"{hours:.2f}"


def _show_time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M %Z")
