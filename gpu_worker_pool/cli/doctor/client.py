"""What `gpu-pool doctor` finds out about the servers that this machine's clients use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus

from gpu_worker_pool.cli.pools.reading import ask_pools
from gpu_worker_pool.cli.pools.report import PoolReport
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.config import SINGULAR_VARIABLE
from gpu_worker_pool.host.addresses import is_this_machine

from .command import Check, Finding, judge_settings


def checks(servers: Servers, heard: Sequence[str]) -> list[Check]:
    """The checks of this machine as a client; `heard` is what the settings said."""
    return [
        Check("client-settings", lambda: judge_settings("client", heard)),
        Check("endpoint", lambda: servers.run(check_endpoints)),
    ]


async def check_endpoints(servers: Servers) -> list[Finding]:
    """Of each server: whether it answers, whether we may ask it for GPUs, and which of them are used from outside."""
    began, found = time.monotonic(), []
    for report in await ask_pools(servers, "?queue=0&leases=0"):
        id_ = report.endpoint
        found.append(judge_reachable(report, time.monotonic() - began))
        if report.is_up and report.has_leases:
            # The renewal of no lease: the server checks the right to write before it reads the body.
            right = await servers.ask(id_, "/leases/renew", "POST", {"ids": []})
            me = await servers.ask(id_, "/ui/data/me")
            found.append(judge_right(id_, right, me, has_token=id_ in servers.config.tokens))
        for gpu in report.view.gpus if report.same_as is None else ():
            if gpu.state == "outside":
                text = f"GPU {report.naming.id_of(gpu)} of {id_} is not granted: {gpu.reason}"
                how = "end those processes, or set GPU_POOL_OUTSIDERS=thresholds at the server"
                found.append(Finding("outside", "warning", text, how, id_))
    return found


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


def judge_right(endpoint: str, right: ServerAnswer, me: ServerAnswer, *, has_token: bool) -> Finding:
    """Whether we may ask it for GPUs, by its answer to a call that changes nothing."""
    by = "with GPU_POOL_TOKEN" if has_token else "without a token"
    if right.status in {HTTPStatus.OK, HTTPStatus.UNPROCESSABLE_ENTITY}:
        data = me.data if me.is_ok and isinstance(me.data, dict) else {}
        who = f" as {data['name']}" if data.get("name") else ""
        who += ", an administrator" if who and data.get("is_admin") else ""
        return Finding("right", "ok", f"{endpoint}: you may request GPUs{who}, {by}", endpoint=endpoint)
    if right.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        how = f"set GPU_POOL_TOKEN to a token that its operator gives you{', or unset it' if has_token else ''}"
        return Finding("right", "problem", f"{endpoint} refuses requests for GPUs {by}: {right.error}", how, endpoint)
    text = f"{endpoint} does not say whether you may request GPUs: {right.error or right.status}"
    return Finding("right", "warning", text, "try again", endpoint)
