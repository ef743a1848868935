"""The statistics calls: /, /gpu/*, /health, /config, /metrics and the probes for monitoring."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import fields, replace

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.readings_history import encode_readings
from gpu_worker_pool.server.authority.sampler import Sampler
from gpu_worker_pool.server.authority.snapshot import Snapshot
from gpu_worker_pool.server.http.accept import wants_page
from gpu_worker_pool.server.http.access import AccessRules
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.loop_share import LoopShare
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import JSON, Response, encode
from gpu_worker_pool.server.http.route_index import Polled
from gpu_worker_pool.server.http.router import redirect
from gpu_worker_pool.server.metrics.collectors import LeaseMetrics, SamplerCollector
from gpu_worker_pool.server.metrics.gpu_metrics import GpuMetrics
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.wire import service
from gpu_worker_pool.wire.routes import FLEET_TABLE, TABLE


class Statistics:
    """Answers from the latest snapshot; no call reads a GPU."""

    def __init__(self, sampler: Sampler, settings: ServerSettings, pool: Pool, rules: AccessRules) -> None:
        self.sampler = sampler
        self.settings = settings
        self._pool = pool
        self._rules = rules
        # A registry for this server alone, so that two servers in one process do not mix.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(SamplerCollector(sampler))
        self._lease_metrics = LeaseMetrics(pool, self._registry)
        self._gpu_metrics = GpuMetrics(sampler, pool, with_dcgm_names=settings.gpu_pool_dcgm_metrics)
        # Looked for once: a folder of PATH may be on a disk that hangs.
        self._has_nvidia_smi = shutil.which("nvidia-smi") is not None
        self._encoding = asyncio.Lock()
        self._history_of: tuple[Snapshot | None, Snapshot | None] = (None, None)
        self._history_body = b""

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

    async def history(self) -> bytes:
        """The body of /gpu/history, encoded once for all calls until the next sample."""
        async with self._encoding:
            latest, snapshots = self.sampler.snapshot, list(self.sampler.history)
            # A sample is visible a moment before it is in the history.
            made_of = (latest, snapshots[-1] if snapshots else None)
            if self._history_of != made_of:
                max_history = self.settings.max_history
                self._history_body = await asyncio.to_thread(encode_readings, snapshots, latest, max_history)
                self._history_of = made_of
            return self._history_body

    async def metrics(self, loop_share: LoopShare | None = None) -> list[bytes]:
        """The text for Prometheus, in parts: a thousand GPUs have megabytes, and each copy of them takes long."""
        loop_share = loop_share or LoopShare()
        parts = await self._gpu_metrics.parts(loop_share)
        await self._lease_metrics.look(loop_share)
        parts.append(generate_latest(self._registry))
        await loop_share.yield_if_due()
        return parts

    def handlers(self) -> Handlers:
        return {
            "gpu_stats": Polled(lambda: self.snapshot().ask("stats_body")),
            "gpu_count": Polled(lambda: self.snapshot().ask("count_body")),
            "gpu_summary": Polled(lambda: self.snapshot().ask("summary_body")),
            "gpu_history": self.show_history,
            "home": self.home,
            "health": self.health,
            "config": self.config,
            "metrics": self.show_metrics,
            "livez": self.livez,
            "readyz": self.readyz,
        }

    async def home(self, call: Call) -> Response:
        vary = (b"vary", b"Accept")
        if wants_page(call.headers.get("accept")):
            return redirect("ui", vary)
        settings = self.settings
        table = TABLE if self._pool.membership is None else (*TABLE, *FLEET_TABLE)
        listed = {resource.path.replace("{lease_id}", "{id}"): resource.help for resource in table if resource.help}
        listed |= {settings.docs_url: "Swagger API documentation", settings.redoc_url: "ReDoc API documentation"}
        body = service.Home(
            message=settings.title,
            version=settings.version,
            endpoints={f"{settings.api_prefix}{path}": text for path, text in listed.items() if path},
            source=self.sampler.snapshot.source,
        )
        return Response(200, encode(body), (vary, *JSON))

    async def health(self, _: Call) -> Response:
        snapshot = self.snapshot()
        faulty = [f"GPU {r.gpu.index}: {r.fault}" for r in snapshot.readings if r.fault is not None]
        trouble, fleet = self._pool.why_no_grants, self._pool.fleet()
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
        body = service.Health(
            status="healthy" if reason is None else "degraded",
            nvidia_smi_available=self._has_nvidia_smi,
            timestamp=snapshot.timestamp,
            reason=reason,
            source=snapshot.source,
            gpu_count=len(snapshot.readings),
            reading_age_s=round(self.sampler.age_s(), 3),
            can_grant=trouble is None,
            fleet=fleet,
        )
        return Response(200, encode(body))

    async def config(self, _: Call) -> Response:
        settings, visibility, snapshot = self.settings, self.sampler.visibility, self.sampler.snapshot
        shown = {**vars(settings), "socket": self._rules.socket}
        body = service.Configuration(
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
        return Response(200, encode(body))

    async def show_history(self, _: Call) -> Response:
        return Response(200, await self.history())

    async def show_metrics(self, _: Call) -> Response:
        return Response(200, await self.metrics(), ((b"content-type", CONTENT_TYPE_LATEST.encode()),))

    async def livez(self, _: Call) -> Response:
        return Response(200, encode(service.Alive(status="alive", source=self.sampler.snapshot.source)))

    async def readyz(self, _: Call) -> Response:
        if not self.sampler.has_sampled:
            raise Refusal(503, "The GPUs have not been read yet; ask again in a moment.")
        if (why_stale := self.why_stale()) is not None:
            raise Refusal(503, why_stale)
        return Response(200, encode(service.Alive(status="ready", source=self.sampler.snapshot.source)))
