"""`gpu-pool drain` and `undrain`: take a GPU out of service, and put it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gpu_worker_pool.cli.failure import FAILED, REFUSED, USAGE, Failure
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import out, plain, print_json
from gpu_worker_pool.cli.pools.reading import ask_pool, ask_pools, read_gpu
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
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; every user is shown it.")] = "",
    json: Json = False,
) -> None:
    """Take GPUs out of service: no new leases on them; those there run on. For administrators.

    Each GPU has its own line; those that cannot be changed are named at the end.
    """

    def show(found: GpuReport) -> None:
        if json:
            print_json("drain", found.as_json())
            return
        runs_on = f"; {', '.join(found.view.leases)} on it runs on" if found.view.leases else ""
        out().print(f"GPU {found.id}: {found.view.reason or found.view.state}{runs_on}", markup=False)

    _tell(_Order("drain", {"reason": reason} if reason else {}, show), gpus, endpoint, every=every)


def undrain(
    gpus: GpuArguments = None, endpoint: Endpoints = None, *, every: AllGpus = False, json: Json = False
) -> None:
    """Put GPUs back into service. For administrators."""

    def show(found: GpuReport) -> None:
        if json:
            print_json("undrain", found.as_json())
            return
        out().print(f"GPU {found.id} is in service; it is {found.view.state.replace('_', ' ')} now", markup=False)

    _tell(_Order("undrain", {}, show), gpus, endpoint, every=every)


@dataclass(frozen=True)
class _Order:
    """What to do with each GPU, and how to show that it was done."""

    action: str
    body: dict[str, Any]
    show: Callable[[GpuReport], None]


def _tell(order: _Order, gpus: list[str] | None, endpoint: list[str] | None, *, every: bool) -> None:
    """Show each GPU as it is changed; Failure at the end for those that could not be changed."""
    if bool(gpus) == every:
        action = order.action
        raise Failure(f"name the GPUs to {action}, as `gpu-pool status` shows them, or give --all, and not both", USAGE)

    async def tell(servers: Servers) -> None:
        names, silent = await _named_gpus(servers, gpus)
        refused: dict[str, list[str]] = {}
        codes: list[int] = [FAILED] if silent else []
        for name in names:
            try:
                order.show(await _ask(servers, name, order))
            except Failure as failure:
                refused.setdefault(str(failure), []).append(name)
                codes.append(failure.code)
        if codes:
            reasons = [f"cannot {order.action} GPU {', '.join(which)}: {why}" for why, which in refused.items()]
            reasons += [f"cannot {order.action} the GPUs of {box.endpoint} ({box.url}): {box.error}" for box in silent]
            raise Failure("; ".join(reasons), max(codes))

    Servers(endpoint).run(tell)


async def _named_gpus(servers: Servers, gpus: list[str] | None) -> tuple[list[str], list[PoolReport]]:
    """The GPUs that are meant, without names all of them; and the servers that were meant and do not answer."""
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


def _may_be_box(name: str, endpoints: list[str]) -> bool:
    """Whether this may be the name of an endpoint or of its node, and not of a GPU."""
    return name in endpoints or not (not name or name.isdigit() or name.startswith(("GPU-", "MIG-")) or ":" in name)


async def _ask(servers: Servers, gpu: str, order: _Order) -> GpuReport:
    """The GPU as its server shows it afterwards; Failure where the server refuses, with the reason alone."""
    endpoint, local = find_endpoint(gpu, servers.ids)
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


def find_endpoint(gpu: str, endpoints: list[str]) -> tuple[str, str]:
    """The endpoint of a GPU that is named `2` or `server1:2`, and its name there."""
    endpoint, colon, local = gpu.rpartition(":")
    if colon and local and endpoint in endpoints:
        return endpoint, local
    if len(endpoints) == 1 and not colon and gpu:
        return endpoints[0], gpu
    known = ", ".join(endpoints)
    if colon and local and len(endpoints) == 1:
        why = f"the server asked is {known}, not {endpoint}; write {local} for its GPU, or give the other's --endpoint"
    elif colon and local:
        why = f"{endpoint} is none of the servers asked: {known}"
    else:
        example = f"{endpoints[0]}:2" if len(endpoints) > 1 else "2"
        why = f"it names no GPU of {known}; write {example} as `gpu-pool status` shows it"
    raise Failure(f"{gpu!r}: {why}", USAGE)


def not_found(answer: ServerAnswer, report: PoolReport) -> Failure:
    """The failure for a server that answered 404, by what kind of server it is."""
    if not report.is_up:
        return Failure(f"{answer.url} is not a GPU server ({report.error}); `gpu-pool doctor` looks closer")
    if not report.has_leases:
        return Failure(
            f"{answer.url} has statistics only, and hands out nothing that could be kept back; for leases, run "
            "`gpu-pool serve` on that machine"
        )
    return Failure(f"{plain(answer.error)} `gpu-pool status` shows what it has.", REFUSED)


def failure_of(answer: ServerAnswer, message: str) -> Failure:
    if answer.status is None:
        return Failure(f"{message}; is {answer.url} a running GPU server? `gpu-pool doctor` looks closer")
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        message += " From another machine, set GPU_POOL_TOKEN to the token of admin."
    return Failure(message, FAILED if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else REFUSED)
