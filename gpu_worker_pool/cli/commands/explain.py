"""`gpu-pool explain`: the state of one lease, and why."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any

from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json
from gpu_worker_pool.cli.output import Console, Text, out, print_json
from gpu_worker_pool.cli.pools.lease_search import LeaseId, ask_lease, ask_pools_or_fail, find_lease
from gpu_worker_pool.cli.pools.report import LeaseReport, PoolReport, show_gpus, show_holding, show_since
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.pools.terms import show_start, show_terms
from gpu_worker_pool.cli.table import cut, make_table, print_table
from gpu_worker_pool.cli.units import show_duration
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.wire.endings import ending
from gpu_worker_pool.wire.leases import ObstacleView


def explain(id_: LeaseId, endpoint: Endpoints = None, *, fleet: FleetScope = False, json: Json = False) -> None:
    """Tell why a request waits, who holds what it wants and for how long; or how it stands with a lease.

    Ends with 1 if there is no such lease.
    """
    found = Servers(endpoint, is_fleet=fleet).run(lambda servers: _ask(servers, id_))
    if json:
        print_json("explain", {"leases": [_as_json(lease, report) for lease, report in found]})
        return
    console, now = out(), time.time()
    for lease, report in found:
        _show(console, lease, report, now)


async def _ask(servers: Servers, text: str) -> list[tuple[LeaseReport, PoolReport]]:
    """The lease at each endpoint that has it, and the pool there."""
    reports = await ask_pools_or_fail(servers)
    by_endpoint = {report.endpoint: report for report in reports}
    found = await find_lease(servers, reports, text)
    # A waiting lease that is asked for by its id also tells what stands between it and each GPU.
    fresh = await asyncio.gather(*(ask_lease(servers, lease.endpoint, lease.id) for lease in found))
    return [(new or old, by_endpoint[old.endpoint]) for old, new in zip(found, fresh, strict=True)]


def _show(console: Console, lease: LeaseReport, report: PoolReport, now: float) -> None:
    console.print(_sentence(lease, report, now))
    if lease.view.state != "queued":
        return
    start = show_start(lease.view, now)
    console.print(f"It starts {start}." if start else "When it will start is not known.")
    console.print(f"Why: {lease.why or 'the server does not say'}")
    if not lease.obstacles:
        return
    table = make_table("GPU", "MODEL", "VERDICT", "HELD BY", whole=("GPU",))
    models = {gpu.key: gpu.view.name for gpu in report.gpus}
    for obstacle in lease.obstacles:
        table.add_row(
            Text(lease.naming.id_of(obstacle)),
            Text(models.get(obstacle.uuid) or "unknown"),
            Text(obstacle.text or obstacle.code, "green" if obstacle.code == "eligible" else ""),
            Text("\n".join(_holding(console, holder, now) for holder in _holders(obstacle, report))),
        )
    print_table(console, table)


def _sentence(lease: LeaseReport, report: PoolReport, now: float) -> str:
    view, who = lease.view, f"{lease.holder} ({lease.id})"
    runs = f", for `{lease.command}`" if lease.command else ""
    terms = "".join(f", {term}" for term in show_terms(view, now))
    match view.state:
        case "queued":
            place = f"position {view.position}"
            place += f" of {max(report.queue_length, view.position or 0)}"
            return (
                f"{who} waits at {lease.endpoint} for {lease.wants}{runs}: {place}, priority {view.priority}{terms}, since "
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
                f"{who} is over since {_moment(lease.ended_at, now)}: {end}. {show_gpus(lease.gpu_ids)} at {lease.endpoint} "
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


def _holders(obstacle: ObstacleView, report: PoolReport) -> list[LeaseReport]:
    """The leases on that GPU, whatever its verdict names."""
    on_it = {lease_id for gpu in report.gpus if gpu.key == obstacle.uuid for lease_id in gpu.view.leases}
    return [lease for lease in report.leases if lease.id in on_it.union(obstacle.lease_ids)]


def _holding(console: Console, lease: LeaseReport, now: float) -> str:
    return show_holding(lease, now, cut(console, lease.command or ""))


def _as_json(lease: LeaseReport, report: PoolReport) -> dict[str, Any]:
    names = {gpu.key: gpu.view.name for gpu in report.gpus}
    return {
        **lease.as_json(),
        "queue_length": report.queue_length,
        "obstacles": [
            {
                **lease.naming.as_json(obstacle),
                "name": names.get(obstacle.uuid),
                "code": obstacle.code,
                "text": obstacle.text or obstacle.code,
                "held_by": [
                    {"lease": holder.id, "owner": holder.view.owner, "since": iso_time(holder.since_at)}
                    for holder in _holders(obstacle, report)
                ],
            }
            for obstacle in lease.obstacles
        ],
    }
