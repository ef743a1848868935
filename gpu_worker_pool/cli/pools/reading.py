"""Asking the servers for their pools and leases. Every text of an answer is made plain here: it goes to a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.wire.leases import DrainingLeaseView, WaitingLeaseView
from gpu_worker_pool.wire.pool import GpuState, PoolGpu, PoolView
from gpu_worker_pool.wire.reader import read

from .report import LeaseReport, Naming, PoolReport, check_any_is_up, distinct_leases
from .servers import ServerAnswer, Servers, failure_of, nobody_answered

if TYPE_CHECKING:
    from gpu_worker_pool.wire.statistics import GpuInShort

_MOST_SHOWN: Final = 10
_COMPLETE_WITHIN_S: Final = 2.0


def naming_of(servers: Servers, endpoint: str) -> Naming:
    """How the GPUs of an endpoint that has been asked are called."""
    return Naming(endpoint, servers.config.is_multi, servers.is_scope_fleet(endpoint))


async def ask_pools(servers: Servers, query: str = "") -> list[PoolReport]:
    """The pools of all endpoints, in the order they were given. Those that are down or silent are among them."""
    reports = await servers.each(lambda endpoint: ask_pool(servers, endpoint, query), _without_pool)
    # One server of a fleet answers for all its boxes, and for the fleet without a node.
    ids = [(report.endpoint, (id_, report.view.node) if (id_ := report.view.server_id) else None) for report in reports]
    same = same_as(ids)
    return [replace(report, same_as=same.get(report.endpoint)) for report in reports]


def same_as(servers: Iterable[tuple[str, Hashable | None]]) -> dict[str, str]:
    """Map each endpoint that repeats a server to the server's first endpoint: a server may have several names, and must not be
    counted twice. One without a server id repeats none.
    """
    first: dict[Hashable, str] = {}
    found = {}
    for endpoint, server_id in servers:
        other = endpoint if server_id is None else first.setdefault(server_id, endpoint)
        if other != endpoint:
            found[endpoint] = other
    return found


async def ask_pools_or_fail(servers: Servers) -> list[PoolReport]:
    """All pools; Failure where no server answered."""
    reports = await ask_pools(servers)
    check_any_is_up(reports)
    return reports


async def ask_pool(servers: Servers, endpoint: str, query: str = "") -> PoolReport:
    """The pool of one endpoint; of a server without leases, what its statistics show."""
    answer = await servers.ask(endpoint, f"/pool{query}")
    if answer.status == HTTPStatus.NOT_FOUND:
        return _read_summary(await servers.ask(endpoint, "/gpu/summary"), servers.config)
    return read_pool(answer, naming_of(servers, endpoint))


async def ask_own_pool(servers: Servers, query: str) -> PoolReport:
    """The pool of the one server of an operator's command; Failure where it is down, or has no leases."""
    report = await ask_pool(servers, servers.ids[0], query)
    check_any_is_up([report])
    if not report.has_leases:
        raise Failure(f"{report.url} has statistics only, and no leases; run `gpu-pool serve` on that machine")
    return report


def read_pool(answer: ServerAnswer, naming: Naming) -> PoolReport:
    view = read(PoolView, answer.data, clean=plain) if answer.is_ok else None
    if view is None:
        return _without_pool(answer)
    if answer.data["gpus"] and not view.gpus:
        error = "it shows GPUs that cannot be read; is it a newer version, or another kind of server?"
        return PoolReport(replace(answer, error=error), naming)
    # A GPU of a fleet has one name, whichever box is asked and by whatever name.
    naming = replace(naming, is_fleet=naming.is_fleet or view.fleet is not None)
    listed = [part for name in ("leases", "queue") if isinstance(part := answer.data.get(name), list)]
    bodies = {plain(body["id"]): body for part in listed for body in part if isinstance(body, dict) and "id" in body}
    leases, queue = (
        tuple(LeaseReport(naming, lease, bodies.get(lease.id, {})) for lease in part)
        for part in (view.leases, view.queue)
    )
    return PoolReport(answer, naming, view, leases, queue)


def read_lease(servers: Servers, answer: ServerAnswer) -> LeaseReport | None:
    view = read(WaitingLeaseView, answer.data, clean=plain)
    if view is None:
        return None
    leaving = read(DrainingLeaseView, answer.data, clean=plain) if view.state == "draining" else None
    return LeaseReport(naming_of(servers, answer.endpoint), leaving or view, answer.data)


async def ask_names(servers: Servers) -> dict[str, str]:
    """What each server calls the caller: by the token, or by the Unix user. Failure where no server says."""
    answers = await servers.ask_all("/ui/data/me")
    names = {
        answer.endpoint: plain(answer.data["name"])
        for answer in answers
        if answer.is_ok and isinstance(answer.data, dict) and answer.data.get("name")
    }
    if not names:
        if all(answer.status is None for answer in answers):
            raise nobody_answered(answers)
        raise failure_of(answers[0], "the server does not say which requests are yours")
    return names


def _without_pool(answer: ServerAnswer) -> PoolReport:
    error = "its answer shows no GPUs; is this a GPU statistics server?" if answer.is_ok else plain(answer.why_not)
    return PoolReport(replace(answer, error=error), Naming(answer.endpoint))


def _read_summary(answer: ServerAnswer, config: ClientConfig) -> PoolReport:
    from gpu_worker_pool.wire.statistics import GpuSummary  # noqa: PLC0415 - only for a server without leases

    summary = read(GpuSummary, answer.data, clean=plain) if answer.is_ok else None
    if summary is None:
        return _without_pool(answer)
    gpus = tuple(_judged(gpu, config) for gpu in summary.gpus_summary)
    view = PoolView(gpus=gpus, source=summary.source)
    return PoolReport(answer, Naming(answer.endpoint, config.is_multi), view, has_leases=False)


def _judged(gpu: GpuInShort, config: ClientConfig) -> PoolGpu:
    """A GPU as a client that must decide by itself sees it. Its memory is told in percent, so that is what it has."""
    measured = (
        ("memory", gpu.memory_usage_percent, config.memory_threshold),
        ("utilization", gpu.utilization_percent, config.utilization_threshold),
    )
    state: GpuState = "free"
    reason = None
    if not gpu.healthy:
        state, reason = "unhealthy", "the server calls it unhealthy"
    elif unknown := [what for what, percent, _ in measured if percent is None]:
        state, reason = "unknown", f"its {unknown[0]} is unknown"
    elif high := [each for each in measured if (each[1] or 0.0) >= each[2]]:
        state, reason = "busy", "{} at {:.0f} %, threshold {:g} %".format(*high[0])
    return PoolGpu(
        gpu_id=gpu.gpu_id,
        uuid=gpu.uuid or "",
        name=gpu.name,
        state=state,
        reason=reason,
        memory_total_mb=100.0,
        memory_used_mb=gpu.memory_usage_percent,
        utilization_percent=gpu.utilization_percent,
    )


# --- a lease by its id, or by the beginning of it, as git finds a commit ---------------------------------------------


def complete_lease_id(incomplete: str) -> list[tuple[str, str]]:
    """For the shell: the ids of live leases that begin so, with their holders."""
    leases = distinct_leases(Servers(timeout_s=_COMPLETE_WITHIN_S).run(ask_pools))
    return [(lease.id, f"{lease.view.state}, {lease.holder}") for lease in leases if lease.id.startswith(incomplete)]


async def find_lease(servers: Servers, reports: Sequence[PoolReport], text: str) -> list[LeaseReport]:
    """The lease with this id or beginning, at each endpoint at which it waits. A lease that has ended is found by its
    whole id, for as long as its server remembers it. Failure where there is none, or where several ids begin so.
    """
    if not text:
        raise Failure("the id is empty; `gpu-pool jobs --all` lists all", USAGE)
    live = distinct_leases(reports)
    found = [lease for lease in live if lease.id == text]
    if not found:
        # Before it is taken for a beginning: run-1 does not mean run-10 only because run-1 has ended.
        able = [report for report in reports if report.is_up and report.has_leases and report.same_as is None]
        asked = (ask_lease(servers, report.endpoint, text) for report in able)
        found = [lease for lease in await asyncio.gather(*asked) if lease is not None]
    if not found:
        ids = sorted({lease.id for lease in live if lease.id.startswith(text)})
        if len(ids) > 1:
            more = f" and {len(ids) - _MOST_SHOWN} more" if len(ids) > _MOST_SHOWN else ""
            shown = ", ".join(ids[:_MOST_SHOWN])
            raise Failure(f"{len(ids)} leases begin with {text}: {shown}{more}; write more of the id", REFUSED)
        found = [lease for lease in live if lease.id in ids]
    if not found:
        raise Failure(_unknown(reports, text), REFUSED)
    return found


async def ask_lease(servers: Servers, endpoint: str, lease_id: str) -> LeaseReport | None:
    """A lease as its server shows it now, with its obstacles; None where the server does not know it."""
    answer = await servers.ask(endpoint, lease_path(lease_id))
    lease = read_lease(servers, answer) if answer.status == HTTPStatus.OK else None
    return lease if lease is not None and lease.id == lease_id else None


def lease_path(lease_id: str) -> str:
    return f"/leases/{quote(lease_id, safe='')}"


def _unknown(reports: Sequence[PoolReport], text: str) -> str:
    message = f"there is no job or lease {plain(text)}; `gpu-pool jobs --all` lists all"
    down = [f"{report.endpoint} is down ({report.error})" for report in reports if not report.is_up]
    return f"{message}. {'; '.join(down)}, so it may be there" if down else message
