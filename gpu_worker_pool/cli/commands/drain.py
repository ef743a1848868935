"""`gpu-pool drain`: take a GPU out of service, and put it back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.live import StatusLine
from gpu_worker_pool.cli.options import Endpoints
from gpu_worker_pool.cli.output import complain, out, plain
from gpu_worker_pool.cli.pools.reading import ask_own_pool, ask_pool
from gpu_worker_pool.cli.pools.report import (
    HELD_BACK,
    PoolReport,
    show_gpus,
    show_holding,
)
from gpu_worker_pool.cli.pools.servers import Servers, failure_of, one_server
from gpu_worker_pool.cli.units import parse_moment, show_moment
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.wire.pool import PoolGpu
from gpu_worker_pool.wire.reader import read

_POLL_S = 1.0
# What the server says where the operator has given no reason.
_UNEXPLAINED = "drained by the operator"


def drain(
    gpus: Annotated[
        list[str] | None,
        Argument(
            metavar="[GPU]...",
            help="Each by its index or UUID; in a fleet also node:2. The name of a node means all its GPUs.",
        ),
    ] = None,
    endpoint: Endpoints = None,
    *,
    every: Annotated[bool, Option("--all", help="Every GPU of the server.")] = False,
    at: Annotated[
        str | None,
        Option("--at", metavar="TIME", help="Plan it: '2026-12-01 09:00' of your time zone, 18:00, or 2h from now."),
    ] = None,
    wait: Annotated[
        bool, Option("--wait", help="Wait until no lease is left on them; Ctrl-C ends only the waiting.")
    ] = False,
    reason: Annotated[str, Option("--reason", metavar="TEXT", help="The reason, which every user can see.")] = "",
    undo: Annotated[
        bool,
        Option("--undo", help="Put them back into service, and cancel what is planned; undrain does the same."),
    ] = False,
) -> None:
    """Take GPUs out of service: they get no new leases, and current leases last until they end. For administrators.

    With --at, the drain begins at that time. Until then, only leases that will end before it are granted.
    """
    now, action = time.time(), "undrain" if undo else "drain"
    if bool(gpus) == every:
        both = "--all means every GPU; leave it out, or name no GPUs"
        none = f"name the GPUs to {action}, as `gpu-pool status` shows them, or give --all"
        raise Failure(both if every else none, USAGE)
    if at and wait:
        raise Failure("--wait is for a drain that begins now; leave it or --at out", USAGE)
    if undo and (at or wait or reason):
        raise Failure("--at, --wait and --reason are for a drain; leave them out to put GPUs back into service", USAGE)
    starts_at = None if at is None else parse_moment(at, now, "--at")
    if starts_at is not None and starts_at < now:
        raise Failure(f"--at: {at} is in the past; leave it out to drain now", USAGE)
    body = ({"reason": reason} if reason else {}) | ({} if starts_at is None else {"at": f"{starts_at:.3f}"})
    servers = one_server(endpoint, is_fleet=any(map(_is_of_fleet, gpus or ())))
    done, report, failure = servers.run(lambda opened: _change(opened, action, gpus, body))
    for gpu in done:
        name = report.naming.id_of(gpu)
        if undo:
            out().print(f"GPU {name} is back in service; it is {gpu.state.replace('_', ' ')} now")
        elif starts_at is not None:
            out().print(f"GPU {name} will be out of service from {show_moment(starts_at, now)}")
        else:
            out().print(f"GPU {name} is {_drained(gpu, report)}")
    if starts_at is not None and done:
        complain(HELD_BACK)
    if wait and done:
        if failure is not None:
            complain(str(failure))  # now, and again at the end
        _wait_for(done, report, servers)
    if failure is not None:
        raise failure


def _drained(gpu: PoolGpu, report: PoolReport) -> str:
    given = (gpu.reason or "").removeprefix("taken out of service: ")
    why = f" ({given})" if given and given != _UNEXPLAINED else ""
    if not gpu.leases:
        return f"out of service{why}"
    whose = [
        f"{lease.view.owner or lease.holder}'s lease{f' ({lease.command})' if lease.command else ''}"
        for lease in report.holders(gpu)
    ]
    keeps = "keeps it until it ends" if len(gpu.leases) == 1 else "keep it until they end"
    return f"draining{why}; {' and '.join(whose) or 'a lease'} {keeps}"


class _Changed(NamedTuple):
    """Each GPU afterwards; the pool before; and a failure for the others."""

    gpus: list[PoolGpu]
    report: PoolReport
    failure: Failure | None


async def _change(servers: Servers, action: str, names: Sequence[str] | None, body: Mapping[str, Any]) -> _Changed:
    report = await ask_own_pool(servers, "?queue=0")
    done: list[PoolGpu] = []
    refused: dict[str, list[str]] = {}
    code = 0
    for name in _meant(report, names):
        answer = await servers.ask(servers.ids[0], f"/admin/gpus/{quote(name, safe='')}/{action}", "POST", body)
        found = read(PoolGpu, answer.data, clean=plain) if answer.is_ok else None
        if found is not None:
            done.append(found)
            continue
        failure = Failure(f"the answer of {answer.url} shows no GPU, so this may have failed; check `gpu-pool status`")
        if not answer.is_ok:
            failure = failure_of(answer, plain(answer.error))
        refused.setdefault(str(failure), []).append(name)
        code = max(code, failure.code)
    reasons = [f"cannot {action} {show_gpus(which)}: {why}" for why, which in refused.items()]
    return _Changed(done, report, Failure("; ".join(reasons), code) if refused else None)


def _is_of_fleet(name: str) -> bool:
    """Whether a name means a node, or a GPU of one, and not a GPU of the server that is asked."""
    return not (name.isdigit() or name.startswith(("GPU-", "MIG-")))


def _meant(report: PoolReport, names: Sequence[str] | None) -> list[str]:
    """The GPUs that these names mean, as the server calls them. Failure for a name of nothing, before anything is changed."""
    known = {report.naming.id_of(gpu): gpu.node for gpu in report.view.gpus}
    if names is None:
        return list(known)
    found: list[str] = []
    for name in names:
        of_node = [gpu for gpu, node in known.items() if name in (node, report.view.node, report.endpoint)]
        if not of_node and _is_of_fleet(name) and name not in known:
            nodes = sorted({node for node in known.values() if node} - {report.view.node})
            there = f"its nodes are {', '.join(nodes)}" if nodes else f"it has {', '.join(known)}"
            raise Failure(f"{name!r} is not a GPU of {report.endpoint}; {there}", USAGE)
        found += of_node or [name]
    return list(dict.fromkeys(found))


def _wait_for(drained: list[PoolGpu], before: PoolReport, servers: Servers) -> None:
    """Return once no lease is left on these GPUs, and they are out of service."""
    names = before.naming.show(drained)

    async def wait(opened: Servers) -> None:
        line = StatusLine()
        try:
            while left := _what_is_left(drained, await ask_pool(opened, opened.ids[0], "?queue=0")):
                line.show(f"waiting: {'; '.join(left)}")
                await asyncio.sleep(_POLL_S)
        finally:
            line.close()

    try:
        servers.run(wait)
    except KeyboardInterrupt:
        complain(f"stopped waiting. {names} stay drained; `gpu-pool undrain` puts them back into service")
        raise
    complain(f"no lease is left on {names}")


def _what_is_left(drained: Sequence[PoolGpu], report: PoolReport) -> list[str]:
    """What there is to wait for. Failure where a GPU is back in service."""
    if report.error is not None:
        return [f"{report.endpoint} is down: {report.error}"]
    now, left = time.time(), []
    wanted = {gpu.uuid for gpu in drained}
    for gpu in (gpu for gpu in report.view.gpus if gpu.uuid in wanted):
        name = report.naming.id_of(gpu)
        if not gpu.is_out_of_service:
            raise Failure(f"GPU {name} is back in service; there is nothing to wait for", REFUSED)
        if gpu.leases:
            holders = [show_holding(lease, now, lease.command) for lease in report.holders(gpu)]
            left.append(f"GPU {name} has {' and '.join(holders or gpu.leases)}")
    return left
