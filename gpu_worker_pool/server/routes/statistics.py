"""The statistics: /, /gpu/*, /health, /config, /metrics and the probes for monitoring."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Final

from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.box.sampler import Sampler
from gpu_worker_pool.server.box.snapshot import Snapshot, encode_readings
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import PoolRouter
from gpu_worker_pool.server.http.response import JSON, Refusal, Response, redirect, wants_page
from gpu_worker_pool.server.http.shared_answer import SharedAnswers
from gpu_worker_pool.server.metrics import CONTENT_TYPE, Metrics
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.wire import service
from gpu_worker_pool.wire import statistics as wire

logger = logging.getLogger(__name__)
VARY: Final = (b"vary", b"Accept")

# A web page of any origin may read these, where CORS is on. No other call is open to it.
router = PoolRouter(ignores_query=True, is_readable_everywhere=True)


class Statistics:
    """Answers from the latest snapshot; no call reads a GPU."""

    def __init__(self, sampler: Sampler, settings: ServerSettings, pool: Pool) -> None:
        self.sampler = sampler
        self.settings = settings
        # Read once: a path on a file system that hangs must not stop the server later.
        self.has_nvidia_smi = shutil.which("nvidia-smi") is not None
        self.metrics = Metrics(sampler, pool, with_dcgm_names=settings.gpu_pool_dcgm_metrics)

    def snapshot(self) -> Snapshot:
        """The latest snapshot; if it is stale, its error says so."""
        snapshot = self.sampler.snapshot
        stale = self.why_stale()
        if stale is None:
            return snapshot
        return replace(snapshot, error="; ".join(filter(None, (stale, snapshot.error))))

    def why_stale(self) -> str | None:
        """Why the latest snapshot is too old; None if it is not."""
        age_s = self.sampler.age_s()
        if age_s <= self.settings.stale_after_s:
            return None
        source = self.sampler.snapshot.source
        return f"the last reading is {age_s:.0f} s old: {source} has not answered since"

    def log_gpus(self, after_s: float) -> None:
        """Say at the start which GPUs there are, or that they were not read in this time."""
        snapshot = self.sampler.snapshot
        if not self.sampler.has_sampled:
            logger.warning("the GPUs have not been read yet after %g s; nothing is granted before", after_s)
            return
        kind = "SIMULATED, not hardware" if snapshot.source == "simulated" else f"source: {snapshot.source}"
        shown = len(snapshot.readings)
        hidden = f", {snapshot.installed - shown} more hidden" if snapshot.installed > shown else ""
        faulty = sum(reading.fault is not None for reading in snapshot.readings)
        logger.info("GPUs shown: %d%s%s (%s)", shown, f", {faulty} of them faulty" if faulty else "", hidden, kind)

    async def watch(self, on_new: Callable[[Snapshot], None]) -> None:
        """Pass new readings on, and log when readings grow stale, which a sampler that hangs cannot do."""
        was_stale = False
        shown: Snapshot | None = None
        while True:
            await asyncio.sleep(min(self.settings.refresh_interval, 1.0))
            if self.sampler.snapshot is not shown:
                shown = self.sampler.snapshot
                on_new(shown)
            why = self.why_stale()
            if why is not None and not was_stale:
                logger.warning("%s", why)
            was_stale = why is not None

    async def history(self) -> bytes:
        """The body of /gpu/history."""
        latest, snapshots = self.sampler.snapshot, list(self.sampler.history)
        return await asyncio.to_thread(encode_readings, snapshots, latest, self.settings.max_history)

    def polled(self) -> Mapping[str, Callable[[], bytes]]:
        """What is polled most, by its path: bodies that are encoded already."""
        return {
            "/gpu/stats": lambda: self.snapshot().stats_body,
            "/gpu/count": lambda: self.snapshot().count_body,
            "/gpu/summary": lambda: self.snapshot().summary_body,
        }


@router.get(
    "/",
    help="This help message",
    statuses={200: "Successful Response", 307: "Redirect to the page, for a browser"},
    response_model=service.Home,
)
async def home(call: Call) -> Response:
    """The list of calls."""
    if wants_page(call.headers.get("accept")):
        return redirect("ui", VARY)
    statistics = call.part(Statistics)
    settings = statistics.settings
    body = service.Home(
        message=settings.title,
        version=settings.version,
        endpoints=call.endpoints,
        source=statistics.sampler.snapshot.source,
    )
    return Response(200, encode(body), (VARY, *JSON))


@router.get("/gpu/stats", help="Get detailed GPU statistics", response_model=wire.GpuStatistics)
async def gpu_stats(call: Call) -> bytes:
    """All GPUs in detail."""
    return call.part(Statistics).snapshot().stats_body


@router.get("/gpu/count", help="Get number of installed GPUs", response_model=wire.GpuCount)
async def gpu_count(call: Call) -> bytes:
    """The number of GPUs."""
    return call.part(Statistics).snapshot().count_body


@router.get("/gpu/summary", help="Get summary of GPU usage", response_model=wire.GpuSummary)
async def gpu_summary(call: Call) -> bytes:
    """All GPUs in brief."""
    return call.part(Statistics).snapshot().summary_body


@router.get("/health", help="Health check endpoint")
async def health(call: Call) -> service.Health:
    """The health of the server."""
    statistics, pool = call.part(Statistics), call.pool
    snapshot = statistics.snapshot()
    faulty = [f"GPU {r.gpu.index}: {r.fault}" for r in snapshot.readings if r.fault is not None]
    trouble, fleet = pool.why_no_grants, pool.fleet()
    others = [f"GPU {r.gpu.index}: {r.other_server}" for r in snapshot.readings if r.other_server is not None]
    unfit = fleet.trouble if fleet is not None and trouble is None else None
    reasons = [
        snapshot.error,
        *faulty,
        *others,
        f"no GPU can be granted: {trouble}" if trouble else None,
        f"this server could not take over: {unfit}" if unfit else None,
    ]
    reason = "; ".join(filter(None, reasons)) or None
    return service.Health(
        status="healthy" if reason is None else "degraded",
        nvidia_smi_available=statistics.has_nvidia_smi,
        timestamp=snapshot.timestamp,
        reason=reason,
        source=snapshot.source,
        gpu_count=len(snapshot.readings),
        reading_age_s=round(statistics.sampler.age_s(), 3),
        can_grant=trouble is None,
        fleet=fleet,
    )


@router.get("/config", help="Get server configuration")
async def config(call: Call) -> service.Configuration:
    """The settings in force."""
    statistics = call.part(Statistics)
    settings, sampler = statistics.settings, statistics.sampler
    visibility, snapshot = sampler.visibility, sampler.snapshot
    shown = {**vars(settings), "socket": call.rules.socket}
    return service.Configuration(
        server=service.ServerPart(**{item.name: shown[item.name] for item in fields(service.ServerPart)}),
        api=service.ApiPart(**{item.name: shown[item.name] for item in fields(service.ApiPart)}),
        monitoring=service.MonitoringPart(
            refresh_interval=settings.refresh_interval, max_history=settings.max_history, source=snapshot.source
        ),
        gpu_filtering=service.FilteringPart(
            cuda_visible_devices=settings.cuda_visible_devices,
            visible_gpu_ids=tuple(visibility.indices),
            filtering_active=visibility.is_filtering,
            total_system_gpus=snapshot.installed,
            visible_gpu_count=len(snapshot.readings),
        ),
    )


@router.get("/gpu/history", help="Get the last readings of each GPU", response_model=wire.GpuHistory)
async def gpu_history(call: Call) -> bytes:
    """The last readings of each GPU."""
    return await call.part(SharedAnswers).get("history", call.part(Statistics).history)


@router.get("/metrics", help="Metrics for Prometheus", media_type="text/plain")
async def metrics(call: Call) -> Response:
    """Metrics for Prometheus."""
    body = await call.part(Statistics).metrics.text()
    return Response(200, body, ((b"content-type", CONTENT_TYPE.encode()),))


@router.get("/livez", help="Whether the server is alive")
async def livez(call: Call) -> service.Alive:
    """Whether the server is alive."""
    return service.Alive(status="alive", source=call.part(Statistics).sampler.snapshot.source)


@router.get("/readyz", help="Whether the server has fresh readings", problems=(503,))
async def readyz(call: Call) -> service.Alive:
    """Whether the server has fresh readings."""
    statistics = call.part(Statistics)
    if not statistics.sampler.has_sampled:
        raise Refusal(503, "The GPUs have not been read yet; ask again in a moment.")
    if (why_stale := statistics.why_stale()) is not None:
        raise Refusal(503, why_stale)
    return service.Alive(status="ready", source=statistics.sampler.snapshot.source)
