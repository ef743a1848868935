"""`gpu-pool drain` and `undrain`: take a GPU out of service, and put it back."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gpu_worker_pool.cli.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.cli.moments import parse_moment, show_moment
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import complain, out, plain, print_json
from gpu_worker_pool.cli.pools.reading import ask_pool, read_gpu
from gpu_worker_pool.cli.pools.refusals import failure_of, not_found
from gpu_worker_pool.cli.pools.report import GpuReport, PoolReport, show_gpus, show_holding
from gpu_worker_pool.cli.pools.servers import Servers, find_endpoint
from gpu_worker_pool.cli.status_line import StatusLine

POLL_S = 1.0

GpuArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[GPU]...",
        help="Each by its index or UUID, where there are several servers as server1:2; or a server's name, for all its GPUs.",
    ),
]
AllGpus = Annotated[bool, typer.Option("--all", help="Every GPU of every server.")]


def drain(
    gpus: GpuArguments = None,
    endpoint: Endpoints = None,
    *,
    every: AllGpus = False,
    at: Annotated[
        str | None,
        typer.Option(
            "--at", metavar="TIME", help="From then on: '2026-12-01 09:00' of your time zone, 18:00, or 2h from now."
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until no lease is left on them; Ctrl-C ends the waiting only.")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why; every user is shown it.")] = "",
    json: Json = False,
) -> None:
    """Take GPUs out of service: no new leases on them; those there run on. Only admin may.

    With --at it is planned: until then, leases whose time limit ends before are granted.
    """
    now = time.time()
    starts_at = None if at is None else parse_moment(at, now, "--at")
    body = {"reason": reason} if reason else {}
    drained = _tell(
        gpus, endpoint, "drain", body | ({} if starts_at is None else {"at": f"{starts_at:.3f}"}), every=every
    )
    for found in drained:
        if json:
            print_json("drain", found.as_json())
            continue
        said = found.view.reason or found.view.state
        if starts_at is not None and not found.view.is_out_of_service:
            said = f"out of service from {show_moment(starts_at, now)} on" + (f": {reason}" if reason else "")
        runs_on = f"; {', '.join(found.view.leases)} on it runs on" if found.view.leases else ""
        out().print(f"GPU {found.id}: {said}{runs_on}", markup=False)
    if wait:
        _wait_for(drained, endpoint)


def undrain(
    gpus: GpuArguments = None, endpoint: Endpoints = None, *, every: AllGpus = False, json: Json = False
) -> None:
    """Put GPUs back into service, and cancel a drain that is planned. Only admin may."""
    for found in _tell(gpus, endpoint, "undrain", {}, every=every):
        if json:
            print_json("undrain", found.as_json())
            continue
        state = found.view.state.replace("_", " ")
        out().print(f"GPU {found.id} is in service, and no drain of it is planned; it is {state} now", markup=False)


def _wait_for(drained: list[GpuReport], endpoint: list[str] | None) -> None:
    """Return once no lease is left on these GPUs, and they are out of service."""
    names = show_gpus([gpu.id for gpu in drained])
    try:
        Servers(endpoint).run(lambda servers: _wait_until_empty(servers, drained))
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


def _tell(
    gpus: list[str] | None, endpoint: list[str] | None, action: str, body: dict[str, Any], *, every: bool
) -> list[GpuReport]:
    if bool(gpus) == every:
        raise Failure(f"name the GPUs to {action}, as `gpu-pool status` shows them, or give --all, and not both", USAGE)

    async def tell(servers: Servers) -> list[GpuReport]:
        names = [name for given in gpus or () for name in await _gpus_of(servers, given)]
        if every:
            names = [name for server in servers.ids for name in await _gpus_of(servers, server)]
        return [await _ask(servers, name, action, body) for name in dict.fromkeys(names)]

    return Servers(endpoint).run(tell)


async def _gpus_of(servers: Servers, name: str) -> list[str]:
    """The GPU of this name; of an endpoint or its node, all GPUs."""
    if name not in servers.ids and (not name or name.isdigit() or name.startswith(("GPU-", "MIG-")) or ":" in name):
        find_endpoint(name, servers.ids)  # before anything is changed
        return [name]
    reports = [await ask_pool(servers, endpoint, "?queue=0") for endpoint in servers.ids]
    meant = [report for report in reports if name in (report.endpoint, report.view.node)]
    for report in meant:
        if report.error is not None:
            raise Failure(f"{report.endpoint} is down: {report.error}; nothing was changed")
    return [gpu.id for report in meant for gpu in report.gpus] if meant else [name]


async def _ask(servers: Servers, gpu: str, action: str, body: dict[str, Any]) -> GpuReport:
    """The GPU as its server shows it afterwards; Failure where the server refuses."""
    endpoint, local = find_endpoint(gpu, servers.ids)
    answer = await servers.ask(endpoint, f"/admin/gpus/{quote(local, safe='')}/{action}", "POST", body)
    if answer.status == HTTPStatus.NOT_FOUND:
        # The server may not know this GPU, or not know this call.
        raise not_found(answer, await ask_pool(servers, endpoint, "?queue=0&leases=0"), f"cannot {action} GPU {gpu}")
    if not answer.is_ok:
        raise failure_of(answer, f"cannot {action} GPU {gpu}: {plain(answer.error)}")
    found = read_gpu(servers, answer)
    if found is None:
        raise Failure(
            f"whether GPU {gpu} is {action}ed is not known: the answer of {answer.url} shows no GPU; "
            "`gpu-pool status` shows how it is"
        )
    return found
