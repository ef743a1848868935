"""Asking the servers for their pools. Every text of an answer is made plain here: it goes to a terminal."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING

from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.wire.leases import DrainingLeaseView, WaitingLeaseView
from gpu_worker_pool.wire.pool import GpuState, PoolGpu, PoolView, ThresholdsView
from gpu_worker_pool.wire.reader import read
from gpu_worker_pool.wire.same_server import pool_key, same_as

if TYPE_CHECKING:
    from gpu_worker_pool.wire.statistics import GpuInShort
from .naming import Naming
from .plans import BookingReport, ReservationReport
from .report import GpuReport, LeaseReport, PoolReport
from .servers import ServerAnswer, Servers, failure_of, nobody_answered


async def ask_pools(servers: Servers, query: str = "") -> list[PoolReport]:
    """The pools of all endpoints, in the order they were given. Those that are down or silent are among them."""
    reports = await servers.each(lambda endpoint: ask_pool(servers, endpoint, query), _without_pool)
    same = same_as((report.endpoint, pool_key(report.view.server_id, report.view.node)) for report in reports)
    return [replace(report, same_as=same.get(report.endpoint)) for report in reports]


async def ask_pool(servers: Servers, endpoint: str, query: str = "") -> PoolReport:
    """The pool of one endpoint; of a server without leases, what its statistics show."""
    answer = await servers.ask(endpoint, f"/pool{query}")
    if answer.status != HTTPStatus.NOT_FOUND:
        naming = servers.naming(endpoint)
        return read_pool(answer, is_multi=naming.is_multi, is_fleet=naming.is_fleet)
    return _read_summary(await servers.ask(endpoint, "/gpu/summary"), servers.config)


def read_pool(answer: ServerAnswer, *, is_multi: bool, is_fleet: bool = False) -> PoolReport:
    view = read(PoolView, answer.data, clean=plain) if answer.is_ok else None
    if view is None:
        return _without_pool(answer)
    if answer.data["gpus"] and not view.gpus:
        error = "it shows GPUs that cannot be read; is it a newer version, or another kind of server?"
        return PoolReport(answer.endpoint, answer.url, error, answer.status)
    naming = Naming(answer.endpoint, is_multi, is_fleet)
    listed = [part for name in ("leases", "queue") if isinstance(part := answer.data.get(name), list)]
    bodies = {plain(body["id"]): body for part in listed for body in part if isinstance(body, dict) and "id" in body}
    return PoolReport(
        answer.endpoint,
        answer.url,
        view=view,
        body=answer.data,
        gpus=tuple(GpuReport(naming, gpu) for gpu in view.gpus),
        leases=tuple(LeaseReport(naming, lease, bodies.get(lease.id, {})) for lease in view.leases),
        queue=tuple(LeaseReport(naming, lease, bodies.get(lease.id, {})) for lease in view.queue),
        reservation=None if view.reservation is None else ReservationReport(naming, view.reservation),
        bookings=tuple(BookingReport(naming, booking) for booking in view.bookings),
    )


def read_lease(servers: Servers, answer: ServerAnswer) -> LeaseReport | None:
    view = read(WaitingLeaseView, answer.data, clean=plain)
    if view is None:
        return None
    leaving = read(DrainingLeaseView, answer.data, clean=plain) if view.state == "draining" else None
    return LeaseReport(servers.naming(answer.endpoint), leaving or view, answer.data)


def read_gpu(servers: Servers, answer: ServerAnswer) -> GpuReport | None:
    view = read(PoolGpu, answer.data, clean=plain)
    return None if view is None else GpuReport(servers.naming(answer.endpoint), view)


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
        raise failure_of(answers[0], "which requests are yours is not known")
    return names


def _without_pool(answer: ServerAnswer) -> PoolReport:
    error = "its answer shows no GPUs; is this a GPU statistics server?" if answer.is_ok else plain(answer.why_not)
    return PoolReport(answer.endpoint, answer.url, error, answer.status)


def _read_summary(answer: ServerAnswer, config: ClientConfig) -> PoolReport:
    from gpu_worker_pool.wire.statistics import GpuSummary  # noqa: PLC0415 - only for a server without leases

    summary = read(GpuSummary, answer.data, clean=plain) if answer.is_ok else None
    if summary is None:
        return _without_pool(answer)
    naming, gpus = Naming(answer.endpoint, config.is_multi), []
    for gpu in summary.gpus_summary:
        state, reason = _judge(gpu, config)
        shown = PoolGpu(
            gpu_id=gpu.gpu_id,
            uuid=gpu.uuid or "",
            name=gpu.name,
            state=state,
            reason=reason,
            utilization_percent=gpu.utilization_percent,
        )
        gpus.append(GpuReport(naming, shown, gpu.memory_usage_percent))
    thresholds = ThresholdsView(memory_percent=config.memory_threshold)
    view = PoolView(gpus=tuple(gpu.view for gpu in gpus), thresholds=thresholds, source=summary.source)
    return PoolReport(answer.endpoint, answer.url, has_leases=False, view=view, body=answer.data, gpus=tuple(gpus))


def _judge(gpu: GpuInShort, config: ClientConfig) -> tuple[GpuState, str | None]:
    """The state of a GPU, as a client that must decide by itself sees it."""
    if not gpu.healthy:
        return "unhealthy", "the server calls it unhealthy"
    for what, percent, threshold in (
        ("memory", gpu.memory_usage_percent, config.memory_threshold),
        ("utilization", gpu.utilization_percent, config.utilization_threshold),
    ):
        if percent is None:
            return "unknown", f"its {what} is unknown"
        if percent >= threshold:
            return "busy", f"{what} at {percent:.0f} %, threshold {threshold:g} %"
    return "free", None
