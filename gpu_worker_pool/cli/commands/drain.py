"""`gpu-pool drain` and `undrain`: take a GPU out of service, and put it back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.live import StatusLine
from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json
from gpu_worker_pool.cli.output import complain, out, plain, print_body
from gpu_worker_pool.cli.pools.plans import HELD_BACK
from gpu_worker_pool.cli.pools.reading import ask_pool, read_gpu
from gpu_worker_pool.cli.pools.report import GpuReport, PoolReport, check_any_is_up, show_gpus, show_holding
from gpu_worker_pool.cli.pools.servers import Servers, failure_of, one_server
from gpu_worker_pool.cli.units import parse_moment, show_moment
from gpu_worker_pool.failure import REFUSED, USAGE, Failure

POLL_S = 1.0
# What the server says where the operator has given no reason.
UNEXPLAINED = "drained by the operator"
GpuArguments = Annotated[
    list[str] | None,
    Argument(
        metavar="[GPU]...",
        help="Each by its index or UUID, or the name of the node for all its GPUs. With --fleet: node:2, or a node.",
    ),
]
AllGpus = Annotated[bool, Option("--all", help="Every GPU of the server.")]


def drain(
    gpus: GpuArguments = None,
    endpoint: Endpoints = None,
    *,
    every: AllGpus = False,
    at: Annotated[
        str | None,
        Option("--at", metavar="TIME", help="Plan it: '2026-12-01 09:00' of your time zone, 18:00, or 2h from now."),
    ] = None,
    wait: Annotated[
        bool, Option("--wait", help="Wait until no lease is left on them; Ctrl-C ends only the waiting.")
    ] = False,
    reason: Annotated[str, Option("--reason", metavar="TEXT", help="Why; every user is shown it.")] = "",
    fleet: FleetScope = False,
    json: Json = False,
) -> None:
    """Take GPUs out of service: they are not granted any more; leases on them last until they end. For administrators.

    With --at it is planned: until then, leases that will have ended in time are granted.
    """
    now = time.time()
    starts_at = None if at is None else parse_moment(at, now, "--at")
    if starts_at is not None and starts_at < now:
        raise Failure(f"--at: {at} is in the past; leave it out to drain now", USAGE)
    body = ({"reason": reason} if reason else {}) | ({} if starts_at is None else {"at": f"{starts_at:.3f}"})
    servers = one_server(endpoint, is_fleet=fleet)
    changed, report, failure = servers.run(
        lambda opened: _change(opened, "drain", _names(gpus, "drain", every=every), body)
    )
    if json:
        print_body({"gpus": [body for _, body in changed]})
    else:
        for gpu, _ in changed:
            out().print(_drained(gpu, report, starts_at, now))
        if starts_at is not None and changed:
            complain(HELD_BACK)
    if wait and changed:
        if failure is not None:
            complain(str(failure))  # now, and again at the end
        _wait_for([gpu for gpu, _ in changed], servers)
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
    names = _names(gpus, "undrain", every=every)
    changed, _, failure = one_server(endpoint, is_fleet=fleet).run(lambda opened: _change(opened, "undrain", names, {}))
    if json:
        print_body({"gpus": [body for _, body in changed]})
    else:
        for gpu, _ in changed:
            state = gpu.view.state.replace("_", " ")
            out().print(f"GPU {gpu.id} is in service, and no drain of it is planned; it is {state} now")
    if failure is not None:
        raise failure


def _drained(gpu: GpuReport, report: PoolReport, starts_at: float | None, now: float) -> str:
    given = (gpu.view.reason or "").removeprefix("taken out of service: ")
    why = f" ({given})" if given and given != UNEXPLAINED else ""
    if starts_at is not None:
        return f"GPU {gpu.id} will be out of service from {show_moment(starts_at, now)}"
    holders = [lease for lease in report.leases if lease.id in gpu.view.leases]
    if not gpu.view.leases:
        return f"GPU {gpu.id} is out of service{why}"
    whose = [
        f"{lease.view.owner or lease.holder}'s lease{f' ({lease.command})' if lease.command else ''}"
        for lease in holders
    ]
    keeps = "keeps it until it ends" if len(gpu.view.leases) == 1 else "keep it until they end"
    return f"GPU {gpu.id} is draining{why}; {' and '.join(whose) or 'a lease'} {keeps}"


def _names(gpus: list[str] | None, action: str, *, every: bool) -> list[str] | None:
    """The names that were typed; None for all."""
    if bool(gpus) == every:
        raise Failure(f"name the GPUs to {action}, as `gpu-pool status` shows them, or give --all, and not both", USAGE)
    return gpus


async def _change(
    servers: Servers, action: str, names: Sequence[str] | None, body: Mapping[str, Any]
) -> tuple[list[tuple[GpuReport, Any]], PoolReport, Failure | None]:
    """Each GPU afterwards, as a report and as the server answered it; the pool before; and a failure for the others."""
    endpoint = servers.ids[0]
    report = await ask_pool(servers, endpoint, "?queue=0")
    check_any_is_up([report])
    if not report.has_leases:
        raise Failure(f"{report.url} has statistics only, and no leases; run `gpu-pool serve` on that machine")
    meant = _meant(report, names)
    done: list[tuple[GpuReport, Any]] = []
    refused: dict[str, list[str]] = {}
    codes: list[int] = []
    for name in meant:
        path = f"/admin/gpus/{quote(name, safe='')}/{action}"
        answer = await servers.ask(endpoint, path, "POST", body)
        found = read_gpu(servers, answer) if answer.is_ok else None
        if found is not None:
            done.append((found, answer.data))
            continue
        failure = failure_of(answer, plain(answer.error)) if not answer.is_ok else _unsure(answer.url)
        refused.setdefault(str(failure), []).append(name)
        codes.append(failure.code)
    reasons = [f"cannot {action} {show_gpus(which)}: {why}" for why, which in refused.items()]
    return done, report, Failure("; ".join(reasons), max(codes)) if codes else None


def _unsure(url: str) -> Failure:
    return Failure(f"the answer of {url} shows no GPU, so it is not known whether it was done; see `gpu-pool status`")


def _meant(report: PoolReport, names: Sequence[str] | None) -> list[str]:
    """The GPUs that these names mean, as the server calls them. Failure for a name of nothing, before anything is changed."""
    if names is None:
        return [gpu.id for gpu in report.gpus]
    found: list[str] = []
    for name in names:
        of_node = [gpu.id for gpu in report.gpus if name in (gpu.view.node, report.view.node, report.endpoint)]
        if not of_node and not (name.isdigit() or name.startswith(("GPU-", "MIG-"))):
            known = [gpu.id for gpu in report.gpus]
            if name not in known:
                nodes = sorted({gpu.view.node for gpu in report.gpus if gpu.view.node} - {report.view.node})
                there = f"its nodes are {', '.join(nodes)}" if nodes else f"it has {', '.join(known)}"
                raise Failure(f"{name!r} is not a GPU of {report.endpoint}; {there}", USAGE)
        found += of_node or [name]
    return list(dict.fromkeys(found))


def _wait_for(drained: list[GpuReport], servers: Servers) -> None:
    """Return once no lease is left on these GPUs, and they are out of service."""
    names = show_gpus([gpu.id for gpu in drained])
    try:
        servers.run(lambda opened: _wait_until_empty(opened, drained))
    except KeyboardInterrupt:
        complain(f"the waiting has ended; {names} stay drained, and `gpu-pool undrain` puts them back")
        raise
    complain(f"no lease is left on {names}")


async def _wait_until_empty(servers: Servers, drained: list[GpuReport]) -> None:
    line = StatusLine()
    try:
        while True:
            report = await ask_pool(servers, servers.ids[0], "?queue=0")
            left = [said for gpu in drained if (said := _what_is_left(gpu, report))]
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
