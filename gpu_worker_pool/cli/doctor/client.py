"""What `gpu-pool doctor` finds out about the servers that this machine's clients use."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.cli.pools.reading import ask_pool
from gpu_worker_pool.cli.pools.report import NOTHING
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers
from gpu_worker_pool.cli.units import count, show_memory
from gpu_worker_pool.config import PLURAL_VARIABLES, SINGULAR_VARIABLE, ClientConfig
from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.urls import EndpointUrl, split_endpoints
from gpu_worker_pool.wire.page import MeView
from gpu_worker_pool.wire.pool import PoolGpu, PoolProcess, PoolView
from gpu_worker_pool.wire.reader import read
from gpu_worker_pool.wire.same_server import pool_key, same_as
from gpu_worker_pool.wire.service import Home

from .finding import Check, Finding, judge_settings

SLOW_S = 1.0
# The Date header has whole seconds only, and a call takes its time.
CLOCK_OFF_S = 5.0
# The renewal of no lease: the server checks the right to write before it reads the body.
RIGHT_CALL = "/leases/renew"
WHO_CALL = "/ui/data/me"
NO_LEASES: Mapping[str, Any] = {"ids": []}
AS_IF_WRITTEN = 422
MAX_VERSION = 40
NO_GPU_SERVER = "its answer is not a GPU server's"


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """What an endpoint showed: its `pool`, or in `error` why it cannot be used. `has_leases` is False where the pool is
    made from statistics. `me` is whom the server takes us for. `same_as` names an earlier endpoint that is the same server.
    """

    id: str
    url: EndpointUrl
    has_token: bool
    took_s: float = 0.0
    error: str | None = None
    status: int | None = None
    version: str | None = None
    pool: PoolView = NOTHING
    has_leases: bool = True
    clock_off_s: float | None = None
    right: ServerAnswer | None = None
    me: MeView | None = None
    same_as: str | None = None


async def ask_all(servers: Servers) -> list[EndpointFacts]:
    return mark_same(await asyncio.gather(*(_ask(servers, endpoint) for endpoint in servers.ids)))


def mark_same(asked: Sequence[EndpointFacts]) -> list[EndpointFacts]:
    same = same_as((facts.id, pool_key(facts.pool.server_id, facts.pool.node)) for facts in asked)
    return [replace(facts, same_as=same.get(facts.id)) for facts in asked]


async def _ask(servers: Servers, endpoint: str) -> EndpointFacts:
    facts = EndpointFacts(endpoint, servers.config.endpoints[endpoint], endpoint in servers.config.tokens)
    began = time.monotonic()
    report = await ask_pool(servers, endpoint, "?queue=0&leases=0")
    facts = replace(facts, took_s=time.monotonic() - began, pool=report.view, has_leases=report.has_leases)
    if report.error is not None:
        error = NO_GPU_SERVER if report.status == HTTPStatus.NOT_FOUND else report.error
        return replace(facts, error=error, status=report.status)
    answer = await servers.ask(endpoint, "/")
    clock_off_s = _clock_off_s(answer)
    home = read(Home, answer.data)
    me = await servers.ask(endpoint, WHO_CALL) if report.has_leases else None
    return replace(
        facts,
        me=read(MeView, me.data, clean=plain) if me is not None and me.is_ok else None,
        version=home.version[:MAX_VERSION] if home and home.version else None,
        clock_off_s=clock_off_s,
        right=await servers.ask(endpoint, RIGHT_CALL, "POST", NO_LEASES) if report.has_leases else None,
    )


def _clock_off_s(answer: ServerAnswer) -> float | None:
    """How far a server's clock is ahead of ours, to about a second, by a fresh answer; None where it does not tell."""
    try:
        told = parsedate_to_datetime(answer.date or "").timestamp()
    except (ValueError, OverflowError):
        return None
    return told + 0.5 - (time.time() - answer.took_s / 2)


def checks(servers: Servers, given: Sequence[str] | None, heard: Sequence[str]) -> list[Check]:
    """The checks of this machine as a client. `given` are the values of --endpoint, `heard` what the settings said."""
    config = servers.config
    memory, utilization = config.asked_memory_threshold, config.asked_utilization_threshold
    urls = [endpoint.url for endpoint in config.endpoints.values()]
    return [
        Check("client-settings", lambda: judge_settings("client", heard)),
        Check("thresholds", lambda: judge_own_thresholds(memory, utilization)),
        Check("endpoints", lambda: judge_variables(os.environ, given, urls)),
        Check("endpoint", lambda: endpoint_findings(servers, is_wanted=is_wanted(os.environ, given))),
    ]


def endpoint_findings(servers: Servers, *, is_wanted: bool) -> list[Finding]:
    try:
        asked = servers.run(ask_all)
    except Failure as failure:  # no server was asked: the certificates cannot be used
        how = "set GPU_POOL_CA_FILE to a file with the certificate of your authority, in PEM format, or unset it"
        return [Finding("endpoint", "problem", str(failure), how)]
    memory, utilization = servers.config.asked_memory_threshold, servers.config.asked_utilization_threshold
    found: list[Finding | None] = []
    for facts in asked:
        found += [judge_reachable(facts, is_wanted=is_wanted), judge_right(facts), judge_open_token(facts)]
        found += [judge_clock(facts), *judge_thresholds(facts, memory, utilization), *judge_outside(facts)]
    return [finding for finding in found if finding is not None]


def judge_variables(environ: Mapping[str, str], given: Sequence[str] | None, urls: Sequence[str]) -> Finding:
    name, listed = "endpoints", ", ".join(urls)
    if given:
        return Finding(name, "ok", f"by --endpoint: {listed}")
    filled = [variable for variable in (*PLURAL_VARIABLES, SINGULAR_VARIABLE) if environ.get(variable, "").strip()]
    found = [variable for variable in filled if split_endpoints(environ[variable])]
    empty = [variable for variable in filled if variable not in found]
    if not found:
        text = f"no variable {'names one' if empty else 'is set'}, so it is the default: {listed}"
    elif len(found) > 1:
        text = f"{' and '.join(found)} are set: {found[0]} wins ({listed}), and the rest is passed over"
    else:
        text = f"by {found[0]}: {listed}"
    text += "".join(f"; {variable}={environ[variable]!r} names nothing and is ignored" for variable in empty)
    useless = found[1:] + empty
    return Finding(name, "warning", text, f"unset {', '.join(useless)}") if useless else Finding(name, "ok", text)


def judge_reachable(facts: EndpointFacts, *, is_wanted: bool) -> Finding:
    """Whether it answers, and what it is. The default endpoint, which the user did not choose, need not be there."""
    where = f"{facts.id} ({facts.url.url})"
    if facts.error is not None:
        text = f"{where} cannot be used: {facts.error}"
        if facts.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            # A GPU server shows its pool to every caller.
            how = "another program answers there, or a proxy that asks for a login: check the address and the proxy"
            return Finding("endpoint", "problem", text, how, facts.id)
        if not is_wanted:
            how = f"start one here with gpu-pool serve, or set {SINGULAR_VARIABLE} to the one you use"
            return Finding("endpoint", "warning", text, how, facts.id)
        how = "start it there (gpu-pool serve), check the address and what is between: firewall, proxy, HOST=127.0.0.1 there"
        return Finding("endpoint", "problem", text, how, facts.id)
    pool = facts.pool
    version = f", version {facts.version}" if facts.version else ""
    text = f"{where}: {count(len(pool.gpus), 'GPU')} ({pool.source or 'source unknown'}){version}, answers in {1000 * facts.took_s:.0f} ms"
    if facts.same_as is not None:
        how = f"take {facts.id} or {facts.same_as} out: a Python client would take its GPUs for twice as many"
        return Finding("endpoint", "warning", f"{text}; it is the same server as {facts.same_as}", how, facts.id)
    if not facts.has_leases:
        how = "only the workers of one process are coordinated there; for leases, run gpu-pool serve on that machine"
        return Finding("endpoint", "warning", f"{text}; it has statistics only", how, facts.id)
    if pool.can_grant is False:
        how = "see that server's log; the reason says what to do there"
        return Finding("endpoint", "problem", f"{text}; it grants nothing: {pool.trouble}", how, facts.id)
    if not pool.gpus:
        return Finding("endpoint", "warning", f"{text}; it has no GPU", "run gpu-pool doctor on that machine", facts.id)
    if facts.took_s > SLOW_S:
        return Finding("endpoint", "warning", f"{text}, which is slow", "look at the network and its load", facts.id)
    return Finding("endpoint", "ok", text, endpoint=facts.id)


def judge_right(facts: EndpointFacts) -> Finding | None:
    """Whether we may ask it for GPUs, by its answer to a call that changes nothing."""
    if facts.right is None:
        return None
    status, detail = facts.right.status, str(facts.right.error or "")
    by = "with GPU_POOL_TOKEN" if facts.has_token else "without a token"
    if status in {200, AS_IF_WRITTEN}:
        who = "" if facts.me is None or not facts.me.name else f" as {facts.me.name}"
        if who and facts.me is not None and facts.me.is_admin:
            who += ", an administrator"
        return Finding("right", "ok", f"{facts.id}: we may ask for GPUs{who}, {by}", endpoint=facts.id)
    if status in {401, 403}:
        how = "set GPU_POOL_TOKEN to the token that its operator gives you"
        if facts.has_token:
            how = "unset GPU_POOL_TOKEN, or set it to a token that this server knows"
        return Finding("right", "problem", f"{facts.id} refuses to give us GPUs {by}: {detail}", how, facts.id)
    text = f"{facts.id}: whether we may ask for GPUs is not known: {detail or status}"
    return Finding("right", "warning", text, "try again", facts.id)


def judge_open_token(facts: EndpointFacts) -> Finding | None:
    if not facts.has_token or facts.url.is_https or is_this_machine(facts.url.host):
        return None
    text = f"the token for {facts.id} goes over the network as it is: {facts.url.url} is not https"
    how = "put a proxy with TLS before the server and use https://, or an SSH tunnel (ssh -L 8000:localhost:8000)"
    return Finding("open-token", "warning", text, how, facts.id)


def judge_clock(facts: EndpointFacts) -> Finding | None:
    off_s = facts.clock_off_s
    if off_s is None:
        return None
    if abs(off_s) <= CLOCK_OFF_S:
        if is_this_machine(facts.url.host):
            return None  # it is our own clock, unless a tunnel begins there
        return Finding("clock", "ok", f"the clock of {facts.id} agrees with ours", endpoint=facts.id)
    text = f"the clock of {facts.id} is {abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} ours"
    how = "leases do not depend on it, but logs, reports and TLS do: let both be set by NTP (timedatectl set-ntp true)"
    return Finding("clock", "warning", text, how, facts.id)


def judge_thresholds(
    facts: EndpointFacts, asked_memory: float | None, asked_utilization: float | None
) -> list[Finding]:
    """Thresholds of 0, and GPUs that outsiders keep over one. What the client asks for replaces the server's."""
    if not facts.has_leases or facts.same_as is not None:
        return []
    theirs = facts.pool.thresholds
    memory = theirs.memory_percent if asked_memory is None else None
    utilization = theirs.utilization_percent if asked_utilization is None else None
    found = judge_own_thresholds(memory, utilization, f"at the server {facts.id}", facts.id)
    if limit := memory if asked_memory is None else asked_memory:
        found += [finding for gpu in facts.pool.gpus if (finding := _outside_use(facts, gpu, limit))]
    return found


def judge_own_thresholds(
    memory: float | None, utilization: float | None, whose: str = "here", endpoint: str | None = None
) -> list[Finding]:
    """Thresholds that no GPU can be below."""
    values = {"GPU_MEMORY_THRESHOLD_PERCENT": memory, "GPU_UTILIZATION_THRESHOLD_PERCENT": utilization}
    found = []
    for variable in (variable for variable, value in values.items() if value == 0):
        text = f"{variable} is 0 {whose}: no GPU is ever below that, so none is ever granted"
        found.append(Finding("thresholds", "problem", text, f"raise {variable} {whose}, or unset it", endpoint))
    return found


def judge_outside(facts: EndpointFacts) -> list[Finding]:
    """GPUs that another server on that machine has, or that processes outside the pool use."""
    found = []
    for gpu in facts.pool.gpus:
        if gpu.state == "outside" and facts.same_as is None:
            how = None
            if gpu.verdict is not None and gpu.verdict.code == "in_use_outside":
                how = "end the processes, or set GPU_POOL_OUTSIDERS=thresholds at the server"
                if name := gpu.verdict.program:
                    how += f"; if they are always there: curl -X PUT {facts.url.url}/admin/ignored-processes/{name}"
            text = f"GPU {gpu.gpu_id} of {facts.id} is not granted: {gpu.reason}"
            found.append(Finding("outside", "warning", text, how, facts.id))
    return found


def _outside_use(facts: EndpointFacts, gpu: PoolGpu, limit_percent: float) -> Finding | None:
    total_mb, outside_mb = gpu.memory_total_mb, gpu.memory_outside_mb
    if (
        gpu.state == "outside"
        or not total_mb
        or outside_mb is None
        or gpu.leases
        or 100 * outside_mb / total_mb < limit_percent
    ):
        return None
    processes = gpu.processes or ()
    named = ", ".join(map(_process, processes)) or "processes that it cannot see"
    text = (
        f"GPU {gpu.gpu_id} of {facts.id} is not granted: {100 * outside_mb / total_mb:.0f} % of its memory is used from "
        f"outside the pool (threshold {limit_percent:g} %), by {named}"
    )
    how = "end them, or raise the threshold"
    if names := [process.name for process in processes if process.name]:
        how += f"; if they are always there: curl -X PUT {facts.url.url}/admin/ignored-processes/{names[0]}"
    return Finding("thresholds", "warning", text, how, facts.id)


def _process(process: PoolProcess) -> str:
    held = "" if process.used_mb is None else f", {show_memory(process.used_mb)}"
    whose = f" of {process.user}" if process.user else ""
    return f"{process.name or 'an unknown program'}{whose} (pid {process.pid}{held})"


def is_wanted(environ: Mapping[str, str], given: Sequence[str] | None) -> bool:
    variables = (*PLURAL_VARIABLES, SINGULAR_VARIABLE)
    return bool(given) or any(split_endpoints(environ.get(variable, "")) for variable in variables)


def is_client_only(config: ClientConfig) -> bool:
    """Whether all servers are elsewhere, so that this machine need not be able to serve."""
    return not any(is_this_machine(endpoint.host) for endpoint in config.endpoints.values())
