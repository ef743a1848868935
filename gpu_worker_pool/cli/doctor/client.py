"""What `gpu-pool doctor` finds out about the servers that this machine's clients use."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from gpu_worker_pool.cli.pools.reading import ask_pools
from gpu_worker_pool.cli.pools.report import PoolReport
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.config import SINGULAR_VARIABLE, ClientConfig
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.addresses import is_this_machine

from .finding import Check, Finding, judge_settings

# The renewal of no lease: the server checks the right to write before it reads the body.
RIGHT_CALL = "/leases/renew"
NO_LEASES: Mapping[str, Any] = {"ids": []}
AS_IF_WRITTEN = frozenset({200, 422})
Asked = tuple[PoolReport, float, ServerAnswer | None, ServerAnswer | None]


def checks(servers: Servers, heard: Sequence[str]) -> list[Check]:
    """The checks of this machine as a client; `heard` is what the settings said."""
    return [
        Check("client-settings", lambda: judge_settings("client", heard)),
        Check("endpoint", lambda: check_endpoints(servers)),
    ]


def check_endpoints(servers: Servers) -> Iterator[Finding]:
    try:
        asked = servers.run(_ask)
    except Failure as failure:  # no server was asked: the certificates cannot be used
        how = "set GPU_POOL_CA_FILE to a file with the certificate of your authority, in PEM format, or unset it"
        yield Finding("endpoint", "problem", str(failure), how)
        return
    for report, took_s, right, me in asked:
        has_token = report.endpoint in servers.config.tokens
        yield judge_reachable(report, took_s)
        if right is not None:
            yield judge_right(report.endpoint, right, me, has_token=has_token)
        for gpu in report.view.gpus if report.same_as is None else ():
            if gpu.state == "outside":
                text = f"GPU {report.naming.id_of(gpu)} of {report.endpoint} is not granted: {gpu.reason}"
                how = "end those processes, or set GPU_POOL_OUTSIDERS=thresholds at the server"
                yield Finding("outside", "warning", text, how, report.endpoint)


async def _ask(servers: Servers) -> list[Asked]:
    """Each server's pool, how long it took, whether we may ask it for GPUs, and who we are there."""
    began = time.monotonic()
    asked: list[Asked] = []
    for report in await ask_pools(servers, "?queue=0&leases=0"):
        took_s, right, me = time.monotonic() - began, None, None
        if report.is_up and report.has_leases:
            right = await servers.ask(report.endpoint, RIGHT_CALL, "POST", NO_LEASES)
            me = await servers.ask(report.endpoint, "/ui/data/me")
        asked.append((report, took_s, right, me))
    return asked


def judge_reachable(report: PoolReport, took_s: float) -> Finding:
    """Whether it answers, and what it is."""
    where, pool, id_ = f"{report.endpoint} ({report.url})", report.view, report.endpoint
    if report.error is not None:
        how = "start it there (gpu-pool serve), and check the address, the firewall, and that its HOST is not 127.0.0.1"
        if report.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            # A GPU server shows its pool to every caller.
            how = "another program answers there, or a proxy that asks for a login: check the address and the proxy"
        elif report.status is None and is_this_machine(report.url.split("://")[-1].partition(":")[0]):
            how = f"start it here (gpu-pool serve), or set {SINGULAR_VARIABLE} to the server that you use"
        return Finding("endpoint", "problem", f"{where} cannot be used: {report.error}", how, id_)
    text = f"{where}: {count(len(pool.gpus), 'GPU')} ({pool.source or 'source unknown'}), answers in {1000 * took_s:.0f} ms"
    if report.same_as is not None:
        how = f"leave out {id_} or {report.same_as}: a Python client would count its GPUs twice"
        return Finding("endpoint", "warning", f"{text}; it is the same server as {report.same_as}", how, id_)
    if not report.has_leases:
        how = "only the workers of one process are coordinated there; for leases, run gpu-pool serve on that machine"
        return Finding("endpoint", "warning", f"{text}; it has statistics only", how, id_)
    if pool.can_grant is False:
        how = "see that server's log; the reason says what to do there"
        why = (pool.fleet and pool.fleet.trouble) or pool.trouble
        return Finding("endpoint", "problem", f"{text}; it grants nothing: {why}", how, id_)
    if not pool.gpus:
        return Finding("endpoint", "warning", f"{text}; it has no GPU", "run gpu-pool doctor on that machine", id_)
    return Finding("endpoint", "ok", text, endpoint=id_)


def judge_right(endpoint: str, right: ServerAnswer, me: ServerAnswer | None, *, has_token: bool) -> Finding:
    """Whether we may ask it for GPUs, by its answer to a call that changes nothing."""
    by = "with GPU_POOL_TOKEN" if has_token else "without a token"
    if right.status in AS_IF_WRITTEN:
        data = me.data if me is not None and me.is_ok and isinstance(me.data, dict) else {}
        who = f" as {data['name']}" if data.get("name") else ""
        who += ", an administrator" if who and data.get("is_admin") else ""
        return Finding("right", "ok", f"{endpoint}: you may request GPUs{who}, {by}", endpoint=endpoint)
    if right.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        how = "set GPU_POOL_TOKEN to the token that its operator gives you"
        if has_token:
            how = "unset GPU_POOL_TOKEN, or set it to a token that this server knows"
        return Finding("right", "problem", f"{endpoint} refuses requests for GPUs {by}: {right.error}", how, endpoint)
    text = f"{endpoint} does not say whether you may request GPUs: {right.error or right.status}"
    return Finding("right", "warning", text, "try again", endpoint)


def is_client_only(config: ClientConfig) -> bool:
    """Whether all servers are elsewhere, so that this machine need not be able to serve."""
    return not any(is_this_machine(endpoint.host) for endpoint in config.endpoints.values())
