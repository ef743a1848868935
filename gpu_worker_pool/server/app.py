"""The application: FastAPI for what people explore and what changes things, and a short way for what is polled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from gpu_worker_pool.gpus.choose import choose_probe
from gpu_worker_pool.gpus.probe import Probe

from .docs_pages import add_docs_pages, assets_folder
from .logs import configure_logging_where_nobody_has
from .problems import install_problem_handlers
from .sampler import Sampler
from .service_manager import notify
from .settings import ServerSettings
from .statistics import JSON, Statistics, make_router

logger = logging.getLogger(__name__)

# How long to wait for the first look before answering; a probe that hangs must not keep the server from starting.
FIRST_LOOK_S = 2.0


class PoolApp(FastAPI):
    """FastAPI, but for the calls that clients poll: those are answered from bytes before any routing."""

    def __init__(self, settings: ServerSettings, statistics: Statistics, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.settings = settings
        self.statistics = statistics
        self._polled: dict[str, Callable[[], bytes]] = {
            f"{settings.api_prefix}/gpu/stats": statistics.stats,
            f"{settings.api_prefix}/gpu/count": statistics.count,
            f"{settings.api_prefix}/gpu/summary": statistics.summary,
        }
        self._headers = [(b"content-type", JSON.encode())]
        if settings.enable_cors:
            self._headers.append((b"access-control-allow-origin", b"*"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a polled call at once, and leave the rest to FastAPI."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server drops the body by itself
        body_of = self._polled.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "GET" else None
        if body_of is None:
            await super().__call__(scope, receive, send)
            return
        body = body_of()
        headers = [*self._headers, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def create_app(settings: ServerSettings | None = None, make_probe: Callable[[], Probe] | None = None) -> PoolApp:
    """The application, by the environment's settings unless others are given."""
    settings = settings or ServerSettings.load()
    node, simulated = settings.gpu_pool_node, settings.simulated_gpus
    sampler = Sampler(
        make_probe or (lambda: choose_probe(node, simulated)),
        interval_s=settings.refresh_interval,
        max_history=settings.max_history,
        visible_devices=settings.cuda_visible_devices,
    )
    statistics = Statistics(sampler, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        configure_logging_where_nobody_has(settings)
        sampler.start()
        sampler.wait_for_first_look(FIRST_LOOK_S)
        _tell_what_is_there(sampler)
        watch = asyncio.create_task(_tell_when_it_grows_stale(statistics))
        notify("READY=1")
        yield
        notify("STOPPING=1")
        watch.cancel()
        sampler.stop()

    app = PoolApp(
        settings,
        statistics,
        title=settings.title,
        description=settings.description,
        version=settings.version,
        openapi_url=f"{settings.api_prefix}/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    if settings.enable_cors:
        # Reading only, and never with credentials: any page may look, none may act.
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["GET", "HEAD"], allow_credentials=False)
    install_problem_handlers(app)
    app.include_router(make_router(statistics), prefix=settings.api_prefix)
    add_docs_pages(
        app,
        prefix=settings.api_prefix,
        docs_url=settings.docs_url,
        redoc_url=settings.redoc_url,
        assets=assets_folder(),
    )
    return app


def _tell_what_is_there(sampler: Sampler) -> None:
    snapshot = sampler.snapshot
    kind = "SIMULATED, not hardware" if snapshot.source == "simulated" else f"source: {snapshot.source}"
    logger.info("GPUs shown: %d (%s)", len(snapshot.readings), kind)


async def _tell_when_it_grows_stale(statistics: Statistics) -> None:
    """The thread that looks cannot say that it hangs; this one can."""
    was_stale = False
    while True:
        await asyncio.sleep(1.0)
        why = statistics.why_stale()
        if why is not None and not was_stale:
            logger.warning("%s", why)
        was_stale = why is not None
