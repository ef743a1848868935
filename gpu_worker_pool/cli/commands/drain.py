"""`gpu-pool drain` and `undrain`: take a GPU out of service, and put it back."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gpu_worker_pool.cli.failure import FAILED, REFUSED, USAGE, Failure
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import out, plain, print_json
from gpu_worker_pool.cli.pools.reading import ask_pool, read_gpu
from gpu_worker_pool.cli.pools.report import GpuReport, PoolReport
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers

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
    reason: Annotated[str, typer.Option("--reason", help="Why; every user is shown it.")] = "",
    json: Json = False,
) -> None:
    """Take GPUs out of service: no new leases on them; those there run on. Only admin may."""
    for found in _tell(gpus, endpoint, "drain", {"reason": reason} if reason else {}, every=every):
        if json:
            print_json("drain", found.as_json())
            continue
        runs_on = f"; {', '.join(found.view.leases)} on it runs on" if found.view.leases else ""
        out().print(f"GPU {found.id}: {found.view.reason or found.view.state}{runs_on}", markup=False)


def undrain(
    gpus: GpuArguments = None, endpoint: Endpoints = None, *, every: AllGpus = False, json: Json = False
) -> None:
    """Put GPUs back into service. Only admin may."""
    for found in _tell(gpus, endpoint, "undrain", {}, every=every):
        if json:
            print_json("undrain", found.as_json())
            continue
        out().print(f"GPU {found.id} is in service; it is {found.view.state.replace('_', ' ')} now", markup=False)


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


def find_endpoint(gpu: str, endpoints: list[str]) -> tuple[str, str]:
    """The endpoint of a GPU that is named `2` or `server1:2`, and its name there."""
    endpoint, colon, local = gpu.rpartition(":")
    if colon and local and endpoint in endpoints:
        return endpoint, local
    if len(endpoints) == 1 and not colon and gpu:
        return endpoints[0], gpu
    example = f"{endpoints[0]}:2" if len(endpoints) > 1 else "2"
    raise Failure(
        f"{gpu!r} names no GPU of {', '.join(endpoints)}; write {example} as `gpu-pool status` shows it", USAGE
    )


def not_found(answer: ServerAnswer, report: PoolReport, message: str) -> Failure:
    """The failure for a server that answered 404, by what kind of server it is."""
    if not report.is_up:
        return Failure(f"{message}: {answer.url} is not a GPU server ({report.error}); `gpu-pool doctor` looks closer")
    if not report.has_leases:
        return Failure(
            f"{message}: {answer.url} has statistics only, and hands out nothing that could be kept back; for leases, run "
            "`gpu-pool serve` on that machine"
        )
    return Failure(f"{message}: {plain(answer.error)} `gpu-pool status` shows what it has.", REFUSED)


def failure_of(answer: ServerAnswer, message: str) -> Failure:
    if answer.status is None:
        return Failure(f"{message}; is {answer.url} a running GPU server? `gpu-pool doctor` looks closer")
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        message += " From another machine, set GPU_POOL_TOKEN to the token of admin."
    return Failure(message, FAILED if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else REFUSED)
