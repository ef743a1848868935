"""`gpu-pool drain` and `undrain`: take a GPU out of service, and put it back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.failure import FAILED, REFUSED, USAGE, Failure
from gpu_worker_pool.cli.live import StatusLine
from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json
from gpu_worker_pool.cli.output import complain, out, plain, print_json
from gpu_worker_pool.cli.pools.plans import HELD_BACK
from gpu_worker_pool.cli.pools.reading import ask_pool, ask_pools, read_gpu
from gpu_worker_pool.cli.pools.refusals import failure_of, not_found
from gpu_worker_pool.cli.pools.report import GpuReport, PoolReport, check_any_is_up, show_gpus, show_holding
from gpu_worker_pool.cli.pools.servers import Servers, find_endpoint
from gpu_worker_pool.cli.units import parse_moment, show_moment
from gpu_worker_pool.host.clock import iso_time

POLL_S = 1.0

GpuArguments = Annotated[
    list[str] | None,
    Argument(
        metavar="[GPU]...",
        help="Each by its index or UUID, where there are several servers as server1:2; or a server's name, for all its GPUs. "
        "With --fleet as node:2, or a node's name.",
    ),
]
AllGpus = Annotated[bool, Option("--all", help="Every GPU of every server.")]


def drain(
    gpus: GpuArguments = None,
    endpoint: Endpoints = None,
    *,
    every: AllGpus = False,
    at: Annotated[
        str | None,
        Option(
            "--at", metavar="TIME", help="From then on: '2026-12-01 09:00' of your time zone, 18:00, or 2h from now."
        ),
    ] = None,
    wait: Annotated[
        bool, Option("--wait", help="Wait until no lease is left on them; Ctrl-C ends the waiting only.")
    ] = False,
    reason: Annotated[str, Option("--reason", metavar="TEXT", help="Why; every user is shown it.")] = "",
    fleet: FleetScope = False,
    json: Json = False,
) -> None:
    """Take GPUs out of service: no new leases on them; those there run on. For administrators.

    Each GPU has its own line; those that cannot be changed are named at the end. With --at it is planned: until then,
    leases that will have ended before are granted.
    """
    now = time.time()
    starts_at = None if at is None else parse_moment(at, now, "--at")
    if starts_at is not None and starts_at < now:
        raise Failure(f"--at: {at} is in the past; leave it out to drain now", USAGE)
    drained: list[GpuReport] = []

    def show(found: GpuReport) -> None:
        drained.append(found)
        if json:
            print_json("drain", {**found.as_json(), "planned_at": None if starts_at is None else iso_time(starts_at)})
            return
        said = found.view.reason or found.view.state
        if starts_at is not None:
            planned = f"out of service from {show_moment(starts_at, now)} on" + (f": {reason}" if reason else "")
            said = f"{said}; and {planned}" if found.view.is_out_of_service else planned
        runs_on = f"; {', '.join(found.view.leases)} on it runs on" if found.view.leases else ""
        out().print(f"GPU {found.id}: {said}{runs_on}")

    body = ({"reason": reason} if reason else {}) | ({} if starts_at is None else {"at": f"{starts_at:.3f}"})
    failure = _tell(_Action("drain", body, show), gpus, Servers(endpoint, is_fleet=fleet), every=every)
    if starts_at is not None and drained and not json:
        complain(HELD_BACK)
    if wait and drained:
        if failure is not None:
            complain(str(failure))  # now, and again at the end
        _wait_for(drained, Servers(endpoint, is_fleet=fleet))
    if failure is not None:
        raise failure


def undrain(
    gpus: GpuArguments = None,
    endpoint: Endpoints = None,
    *,
    every: AllGpus = False,
    fleet: FleetScope = False,
    json: Json = False,
) -> None:
    """Put GPUs back into service, and cancel a drain that is planned. For administrators."""

    def show(found: GpuReport) -> None:
        if json:
            print_json("undrain", found.as_json())
            return
        state = found.view.state.replace("_", " ")
        out().print(f"GPU {found.id} is in service, and no drain of it is planned; it is {state} now")

    failure = _tell(_Action("undrain", {}, show), gpus, Servers(endpoint, is_fleet=fleet), every=every)
    if failure is not None:
        raise failure


@dataclass(frozen=True)
class _Action:
    """What to do with each GPU, and how to show that it was done."""

    action: str
    body: dict[str, Any]
    show: Callable[[GpuReport], None]


def _wait_for(drained: list[GpuReport], servers: Servers) -> None:
    """Return once no lease is left on these GPUs, and they are out of service."""
    names = show_gpus([gpu.id for gpu in drained])
    try:
        servers.run(lambda servers: _wait_until_empty(servers, drained))
    except KeyboardInterrupt:
        complain(f"the waiting has ended; {names} stay drained, and `gpu-pool undrain` puts them back")
        raise
    complain(f"no lease is left on {names}")


async def _wait_until_empty(servers: Servers, drained: list[GpuReport]) -> None:
    line = StatusLine()
    try:
        while True:
            endpoints = dict.fromkeys(gpu.naming.endpoint for gpu in drained)
            reports = {name: await ask_pool(servers, name, "?queue=0") for name in endpoints}
            left = [said for gpu in drained if (said := _what_is_left(gpu, reports[gpu.naming.endpoint]))]
            if not left:
                return
            line.show(f"waiting: {'; '.join(left)}")
            await asyncio.sleep(POLL_S)
    finally:
        line.close()


def _what_is_left(gpu: GpuReport, report: PoolReport) -> str:
    """What there is to wait for; empty if there is nothing. Failure where the GPU is back in service."""
    if report.error is not None:
        return f"{report.endpoint} is down: {report.error}"
    now = time.time()
    there = next((each for each in report.gpus if each.key == gpu.key), None)
    if there is None:
        return ""
    if not there.view.is_out_of_service:
        planned = [each for each in report.bookings if each.is_drain and each.has(gpu.view)]
        if not planned:
            raise Failure(f"GPU {gpu.id} is back in service; there is nothing to wait for", REFUSED)
        return f"GPU {gpu.id} is {planned[0].in_words(now)}"
    holders = [show_holding(lease, now, lease.command) for lease in report.leases if lease.id in there.view.leases]
    return f"GPU {gpu.id} has {' and '.join(holders or there.view.leases)}" if there.view.leases else ""


def _tell(order: _Action, gpus: list[str] | None, servers: Servers, *, every: bool) -> Failure | None:
    """Show each GPU as it is changed; return the failure for those that could not be changed."""
    if bool(gpus) == every:
        action = order.action
        raise Failure(f"name the GPUs to {action}, as `gpu-pool status` shows them, or give --all, and not both", USAGE)

    async def tell(servers: Servers) -> Failure | None:
        names, silent = await _named_gpus(servers, gpus)
        refused: dict[str, list[str]] = {}
        codes: list[int] = [FAILED] if silent else []
        for name in names:
            try:
                order.show(await _ask(servers, name, order))
            except Failure as failure:
                refused.setdefault(str(failure), []).append(name)
                codes.append(failure.code)
        if not codes:
            return None
        reasons = [f"cannot {order.action} GPU {', '.join(which)}: {why}" for why, which in refused.items()]
        reasons += [f"cannot {order.action} the GPUs of {box.endpoint} ({box.url}): {box.error}" for box in silent]
        return Failure("; ".join(reasons), max(codes))

    return servers.run(tell)


async def _named_gpus(servers: Servers, gpus: list[str] | None) -> tuple[list[str], list[PoolReport]]:
    """The GPUs that are meant, without names all of them; and the servers that were meant and do not answer."""
    if servers.is_fleet:
        return await _named_in_fleets(servers, gpus)
    boxes = [name for name in gpus or () if _may_be_box(name, servers.ids)]
    reports: list[PoolReport] = []
    if not gpus or any(name not in servers.ids for name in boxes):
        reports = await ask_pools(servers, "?queue=0")
    elif boxes:
        reports = [await ask_pool(servers, name, "?queue=0") for name in dict.fromkeys(boxes)]
    names: list[str] = []
    silent: list[PoolReport] = []
    for given in gpus or servers.ids:
        meant = [report for report in reports if given in (report.endpoint, report.view.node)]
        if not meant:
            find_endpoint(given, servers.ids)  # before anything is changed
            names.append(given)
        for report in meant:
            if report.error is None:
                names += [gpu.id for gpu in report.gpus]
            else:
                silent.append(report)
    return list(dict.fromkeys(names)), silent


async def _named_in_fleets(servers: Servers, gpus: list[str] | None) -> tuple[list[str], list[PoolReport]]:
    """The same in the scope of fleets, where a name is that of a node, or of a GPU of a node: `gpu-01:2`."""
    reports = await ask_pools(servers, "?queue=0")
    check_any_is_up(reports)
    known = [gpu for report in reports if report.is_up and report.same_as is None for gpu in report.gpus]
    if not gpus:
        return [gpu.id for gpu in known], [report for report in reports if not report.is_up]
    names: list[str] = []
    for given in gpus:
        meant = [gpu.id for gpu in known if given in (gpu.id, gpu.view.uuid, gpu.view.node)]
        if not meant:
            nodes = ", ".join(sorted({gpu.view.node for gpu in known if gpu.view.node}))
            raise Failure(f"{given!r} is neither a node nor a GPU of the fleet; its nodes are {nodes}", USAGE)
        names += meant
    return list(dict.fromkeys(names)), []


def _endpoint_of(servers: Servers, gpu: str) -> tuple[str, str]:
    """Where to ask about a GPU, and its name there."""
    if not servers.is_fleet:
        return find_endpoint(gpu, servers.ids)
    alone, _, local = gpu.rpartition(":")
    # A server that belongs to no fleet calls its GPUs by their index.
    if alone in servers.ids and not servers.naming(alone).is_fleet:
        return alone, local
    return next((id_ for id_ in servers.ids if servers.naming(id_).is_fleet), servers.ids[0]), gpu


def _may_be_box(name: str, endpoints: list[str]) -> bool:
    """Whether this may be the name of an endpoint or of its node, and not of a GPU."""
    return name in endpoints or not (not name or name.isdigit() or name.startswith(("GPU-", "MIG-")) or ":" in name)


async def _ask(servers: Servers, gpu: str, order: _Action) -> GpuReport:
    """The GPU as its server shows it afterwards; Failure where the server refuses, with the reason alone."""
    endpoint, local = _endpoint_of(servers, gpu)
    answer = await servers.ask(endpoint, f"/admin/gpus/{quote(local, safe='')}/{order.action}", "POST", order.body)
    if answer.status == HTTPStatus.NOT_FOUND:
        # The server may not know this GPU, or not know this call.
        raise not_found(answer, await ask_pool(servers, endpoint, "?queue=0&leases=0"))
    if not answer.is_ok:
        raise failure_of(answer, plain(answer.error))
    found = read_gpu(servers, answer)
    if found is None:
        raise Failure(
            f"whether it was done is not known, as the answer of {answer.url} shows no GPU; "
            "`gpu-pool status` shows how it is"
        )
    return found
