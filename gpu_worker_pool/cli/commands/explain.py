"""`gpu-pool explain`: why requests wait, and the state of one lease."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Annotated, NamedTuple

from gpu_worker_pool.cli.declare import Argument
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import Console, Text, complain, out, print_body
from gpu_worker_pool.cli.pools.forecast import forecast_line
from gpu_worker_pool.cli.pools.reading import ask_lease, ask_names, ask_pools_or_fail, complete_lease_id, find_lease
from gpu_worker_pool.cli.pools.report import (
    LeaseReport,
    PoolReport,
    distinct_leases,
    show_gpus,
    show_holding,
    show_since,
    show_start,
    show_terms,
)
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.table import cut, make_table, print_table
from gpu_worker_pool.cli.units import show_duration
from gpu_worker_pool.failure import REFUSED, Failure
from gpu_worker_pool.wire.leases import ending


def explain(
    id_: Annotated[
        str | None,
        Argument(
            metavar="[ID]",
            help="A job number, or the beginning of a lease's id. Without it: your waiting requests.",
            complete=complete_lease_id,
        ),
    ] = None,
    endpoint: Endpoints = None,
    *,
    json: Json = False,
) -> None:
    """Say why your requests wait, who holds what they want, and when they may start; or describe one lease.

    Ends with 1 if there is no such lease.
    """
    explained = Servers(endpoint, is_fleet=True).run(lambda servers: _ask(servers, id_))
    if json:
        print_body({"leases": [{"endpoint": lease.endpoint, **lease.body} for lease, _ in explained.leases]})
        return
    console, now = out(), time.time()
    if explained.forecast is not None:
        console.print(explained.forecast, "bold")
    if not explained.leases:
        complain("you have no waiting requests; `gpu-pool jobs` lists what you run")
    for number, (lease, report) in enumerate(explained.leases):
        if number:
            console.print()
        _show(console, lease, report, now)


class _Explained(NamedTuple):
    """Each lease, and the pool where it is; without an id, also what a request that is made now may expect."""

    leases: list[tuple[LeaseReport, PoolReport]]
    forecast: str | None = None


async def _ask(servers: Servers, text: str | None) -> _Explained:
    """The lease at each endpoint that has it; without an id, all that the caller waits for."""
    reports = await ask_pools_or_fail(servers)
    by_endpoint = {report.endpoint: report for report in reports}
    live = distinct_leases(reports)
    forecast = None
    if text is None:
        names = await ask_names(servers)
        found = [each for each in live if each.view.state == "queued" and each.view.owner == names.get(each.endpoint)]
        forecast = await forecast_line(servers, reports, time.time())
    elif (job := _leases_of_job(text)) is not None:
        ids, worker_id = job
        found = [each for each in live if each.id in ids or (worker_id and each.view.worker_id == worker_id)]
        if not found and not ids:
            raise Failure(
                f"job {text} has not asked for a GPU yet; `gpu-pool jobs {text}` shows what it waits for", REFUSED
            )
        found = found or await find_lease(servers, reports, ids[-1])
    else:
        found = await find_lease(servers, reports, text)
    # A waiting lease that is asked for by its id also tells what stands between it and each GPU.
    fresh = await asyncio.gather(*(ask_lease(servers, lease.endpoint, lease.id) for lease in found))
    told = [(new or old, by_endpoint[old.endpoint]) for old, new in zip(found, fresh, strict=True)]
    return _Explained(told, forecast)


def _leases_of_job(text: str) -> tuple[list[str], str] | None:
    """The leases that a job of this user had, and the name under which it asks; None where the text is not a job's number."""
    if not text.isdecimal():
        return None
    from gpu_worker_pool.jobs.job_store import own_store  # noqa: PLC0415 - only for a job

    record = own_store().load_one(int(text))
    if record is None:
        return None
    runs = record.submission.runs.values()
    return [run.lease_id for run in runs if run.lease_id is not None], record.submission.whole.requested_by


def _show(console: Console, lease: LeaseReport, report: PoolReport, now: float) -> None:
    console.print(_sentence(lease, report, now))
    if lease.view.state != "queued":
        return
    start = show_start(lease.view, now)
    console.print(f"Start: {start or 'not known yet'}")
    console.print(f"Why: {lease.why or 'the server does not say'}")
    if not lease.obstacles:
        return
    table = make_table("GPU", "MODEL", "VERDICT", "HELD BY", whole=("GPU",))
    gpus = {gpu.uuid: gpu for gpu in report.view.gpus}
    for obstacle in lease.obstacles:
        gpu = gpus.get(obstacle.uuid)
        leases = () if gpu is None else report.holders(gpu, obstacle.lease_ids)
        table.add_row(
            lease.naming.id_of(obstacle),
            (gpu and gpu.name) or "unknown",
            Text(obstacle.text or obstacle.code, "green" if obstacle.code == "eligible" else ""),
            "; ".join(show_holding(each, now, cut(console, each.command or "")) for each in leases),
        )
    print_table(console, table)


def _sentence(lease: LeaseReport, report: PoolReport, now: float) -> str:
    view, who = lease.view, f"{lease.holder} ({lease.id})"
    runs = f", for `{lease.command}`" if lease.command else ""
    terms = "".join(f", {term}" for term in show_terms(view, now))
    match view.state:
        case "queued":
            place = f"position {view.position} of {max(report.queue_length, view.position or 0)}"
            priority = f", priority {view.priority}" if view.priority else ""
            return (
                f"{who} waits at {lease.endpoint} for {lease.wants}{runs}: {place}{priority}{terms}, since "
                f"{_moment(lease.requested_at, now)}."
            )
        case "active":
            lasts = " It lasts as long as that process." if view.is_local and view.expires_in_s is None else ""
            place = "" if view.pid is None else f", as pid {view.pid} on {view.host or 'an unknown host'}"
            return (
                f"{who} holds {show_gpus(lease.gpu_ids)} at {lease.endpoint}{runs}{place}, since "
                f"{_moment(lease.granted_at, now)}{terms}.{lasts}"
            )
        case "draining":
            end = ending(view.end_reason or "unknown", view.ended_by, view.end_note)
            return (
                f"{who} ended {_moment(lease.ended_at, now)}: {end}. {show_gpus(lease.gpu_ids)} at {lease.endpoint} "
                f"cannot be granted yet: {view.reason}."
            )
    held = "held nothing"
    if lease.gpus:
        took = f" for {show_duration(lease.ended_at - lease.granted_at)}" if lease.ended_at and lease.granted_at else ""
        held = f"held {show_gpus(lease.gpu_ids)}{took}"
    end = ending(view.end_reason, view.ended_by, view.end_note) if view.end_reason else "the server does not say why"
    return f"{who} {held} at {lease.endpoint}, and ended {_moment(lease.ended_at, now)}: {end}."


def _moment(at: float | None, now: float) -> str:
    if at is None:
        return "an unknown time"
    return f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S} ({show_since(at, now)} ago)"
