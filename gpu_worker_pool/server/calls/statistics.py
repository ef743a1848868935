"""The statistics calls: /, /gpu/*, /health, /config, /metrics and the two probes for whoever watches the server."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from gpu_worker_pool.server.authority.authority import Authority
from gpu_worker_pool.server.authority.readings_history import encode_readings
from gpu_worker_pool.server.authority.sampler import Sampler
from gpu_worker_pool.server.authority.snapshot import Snapshot, encode
from gpu_worker_pool.server.http.problems import Problem, problem
from gpu_worker_pool.server.metrics.gpus import make_registry, render
from gpu_worker_pool.server.metrics.leases import LeaseMetrics
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.ui.calls import wants_page

from . import answers

JSON = "application/json"

ENDPOINTS = {
    "/": "This help message",
    "/ui": "The page: see the pool in a browser",
    "/gpu/stats": "Get detailed GPU statistics",
    "/gpu/count": "Get number of installed GPUs",
    "/gpu/summary": "Get summary of GPU usage",
    "/health": "Health check endpoint",
    "/config": "Get server configuration",
    "/gpu/history": "Get the last readings of each GPU",
    "/metrics": "Metrics for Prometheus",
    "/leases": "Get all live leases",
    "/leases/{id}": "PUT: ask for a GPU; GET: the lease as it is; DELETE: give it back",
    "/leases/renew": "POST: a sign of life for leases",
    "/pool": "Get the node at a glance: GPUs, leases, queue",
    "/usage": "Get GPU-hours by owner; ?since=...&until=...",
    "/timeline": "Get who held which GPU over the last hours; ?hours=6",
    "/peers": "Get the pools of the other servers that this one is told of",
    "/events": "Follow what happens, as Server-Sent Events",
    "/admin/leases/{id}/revoke": "POST: take a lease away (admin)",
    "/admin/gpus/{gpu}/drain": "POST: take a GPU out of service (admin)",
    "/admin/gpus/{gpu}/undrain": "POST: put a GPU back into service (admin)",
    "/admin/ignored-processes/{name}": "PUT, DELETE: leave processes of a name out of the reckoning (admin)",
    "/livez": "Whether the server is alive",
    "/readyz": "Whether the server has something to show",
}


class Statistics:
    """Answers from the latest snapshot. No call here looks at a GPU."""

    def __init__(self, sampler: Sampler, settings: ServerSettings, authority: Authority) -> None:
        self.sampler = sampler
        self.settings = settings
        self.authority = authority
        self._registry = make_registry(sampler, with_dcgm_names=settings.gpu_pool_dcgm_metrics)
        LeaseMetrics(authority, self._registry)
        self._encoding = asyncio.Lock()
        self._history_of: tuple[Snapshot | None, Snapshot | None] = (None, None)
        self._history_body = b""

    def snapshot(self) -> Snapshot:
        """The latest snapshot; one that has grown old says so."""
        snapshot = self.sampler.snapshot
        stale = self.why_stale()
        if stale is None:
            return snapshot
        return replace(snapshot, error="; ".join(filter(None, (stale, snapshot.error))))

    def why_stale(self) -> str | None:
        """Why the latest snapshot is too old to go by; None where it is not."""
        age_s = self.sampler.age_s()
        if age_s <= self.settings.stale_after_s:
            return None
        source = self.sampler.snapshot.source
        return f"the last reading is {age_s:.0f} s old: {source} has not answered since"

    def stats(self) -> bytes:
        """/gpu/stats."""
        return self.snapshot().stats_body

    def count(self) -> bytes:
        """/gpu/count."""
        return self.snapshot().count_body

    def summary(self) -> bytes:
        """/gpu/summary."""
        return self.snapshot().summary_body

    async def history(self) -> bytes:
        """/gpu/history: the ring of the last readings by GPU, encoded once for all who ask before the next look."""
        async with self._encoding:
            latest, snapshots = self.sampler.snapshot, list(self.sampler.history)
            # A look is shown a moment before it is in the ring.
            made_of = (latest, snapshots[-1] if snapshots else None)
            if self._history_of != made_of:
                max_history = self.settings.max_history
                self._history_body = await asyncio.to_thread(encode_readings, snapshots, latest, max_history)
                self._history_of = made_of
            return self._history_body

    def health(self) -> bytes:
        """/health."""
        snapshot = self.snapshot()
        sick = [f"GPU {r.gpu.index}: {r.fault}" for r in snapshot.readings if r.fault is not None]
        trouble = self.authority.trouble
        reasons = [snapshot.error, *sick, f"no GPU can be granted: {trouble}" if trouble else None]
        reason = "; ".join(filter(None, reasons)) or None
        return encode(
            {
                "status": "healthy" if reason is None else "degraded",
                "nvidia_smi_available": shutil.which("nvidia-smi") is not None,
                "timestamp": snapshot.timestamp,
                "reason": reason,
                "source": snapshot.source,
                "gpu_count": len(snapshot.readings),
                "reading_age_s": round(self.sampler.age_s(), 3),
                "can_grant": trouble is None,
            }
        )

    def home(self) -> bytes:
        """/."""
        settings = self.settings
        pages = {settings.docs_url: "Swagger API documentation", settings.redoc_url: "ReDoc API documentation"}
        listed = {**ENDPOINTS, **{path: text for path, text in pages.items() if path}}
        endpoints = {f"{settings.api_prefix}{path}": text for path, text in listed.items()}
        source = self.sampler.snapshot.source
        return encode(
            {"message": settings.title, "version": settings.version, "endpoints": endpoints, "source": source}
        )

    def status(self, word: str) -> bytes:
        """/livez and /readyz, where the answer is yes."""
        return encode({"status": word, "source": self.sampler.snapshot.source})

    def config(self) -> bytes:
        """/config: the settings in force. There is no secret among them."""
        settings, visibility, snapshot = self.settings, self.sampler.visibility, self.sampler.snapshot
        shown = settings.model_dump()
        return encode(
            {
                "server": {key: shown[key] for key in answers.ServerPart.model_fields},
                "api": {key: shown[key] for key in answers.ApiPart.model_fields},
                "monitoring": {
                    "refresh_interval": settings.refresh_interval,
                    "max_history": settings.max_history,
                    "source": snapshot.source,
                },
                "gpu_filtering": {
                    "cuda_visible_devices": settings.cuda_visible_devices,
                    "visible_gpu_ids": list(visibility.indices),
                    "filtering_active": visibility.is_filtering,
                    "total_system_gpus": snapshot.installed,
                    "visible_gpu_count": len(snapshot.readings),
                },
            }
        )

    def metrics(self) -> bytes:
        """/metrics."""
        return render(self._registry)

    def why_not_ready(self) -> str | None:
        """Why there is nothing to show yet, or no more; None where there is."""
        if not self.sampler.has_looked:
            return "The GPUs have not been looked at yet; ask again in a moment."
        return self.why_stale()


def make_router(statistics: Statistics) -> APIRouter:
    """The calls as FastAPI documents them."""
    router = APIRouter()
    calls: tuple[tuple[str, Any, type[Any], str], ...] = (
        ("/gpu/stats", statistics.stats, answers.GpuStatistics, "All GPUs in detail"),
        ("/gpu/count", statistics.count, answers.GpuCount, "How many GPUs"),
        ("/gpu/summary", statistics.summary, answers.GpuSummary, "All GPUs in short"),
        ("/health", statistics.health, answers.Health, "Whether all is well"),
        ("/config", statistics.config, answers.Configuration, "The settings in force"),
    )
    for path, body, model, summary in calls:
        router.add_api_route(path, _serve(body), summary=summary, response_model=model, methods=["GET"])

    @router.get(
        "/",
        summary="What there is",
        response_model=answers.Home,
        responses={307: {"description": "To the page, for a browser"}},
    )
    async def home(request: Request) -> Response:
        vary = {"Vary": "Accept"}
        if wants_page(", ".join(request.headers.getlist("accept"))):
            return Response(status_code=HTTPStatus.TEMPORARY_REDIRECT, headers={**vary, "Location": "ui"})
        return Response(statistics.home(), media_type=JSON, headers=vary)

    @router.get("/gpu/history", summary="The last readings of each GPU", response_model=answers.GpuHistory)
    async def history() -> Response:
        return Response(await statistics.history(), media_type=JSON)

    @router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def metrics() -> Response:
        return Response(statistics.metrics(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/livez", summary="Whether the server is alive", response_model=answers.Alive)
    async def livez() -> Response:
        return Response(statistics.status("alive"), media_type=JSON)

    @router.get(
        "/readyz",
        summary="Whether the server has something to show",
        response_model=answers.Alive,
        responses={503: {"model": Problem, "description": "Not yet"}},
    )
    async def readyz() -> Response:
        why_not = statistics.why_not_ready()
        if why_not is not None:
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, why_not)
        return Response(statistics.status("ready"), media_type=JSON)

    return router


def _serve(body: Any) -> Any:
    async def serve() -> Response:
        return Response(body(), media_type=JSON)

    return serve
