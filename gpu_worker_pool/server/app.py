"""The application: FastAPI for what people explore and what changes things, and a short way for what is polled."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gpu_worker_pool.gpus.choose import choose_probe
from gpu_worker_pool.gpus.probe import Probe
from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.identity import Machine
from gpu_worker_pool.host.limits import raise_limit
from gpu_worker_pool.host.systemd import notify, when_asked_to_stop
from gpu_worker_pool.ledger.journal import JournalInUse
from gpu_worker_pool.ledger.sqlite.accounts import Accounts
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.ledger.state_dir import state_dir

from .authority.authority import Authority
from .authority.sampler import Sampler
from .authority.snapshot import Snapshot
from .calls.admin import AdminCalls
from .calls.leases import LeaseCalls
from .calls.peers import PeerCalls
from .calls.statistics import JSON, Statistics, make_router
from .calls.timeline import TimelineCalls
from .calls.usage import UsageCalls
from .http.access import merge_headers
from .http.call import Call, Reply, not_possible
from .http.docs_pages import add_docs_pages, assets_folder
from .http.problems import install_problem_handlers
from .logs import configure_logging_where_nobody_has
from .settings import ServerSettings
from .streams.streams import Streams
from .ui.calls import PageCalls, wants_page
from .ui.data import PageData

logger = logging.getLogger(__name__)

# How long to wait for the first look before answering; a probe that hangs must not keep the server from starting.
FIRST_LOOK_S = 2.0


class PoolApp(FastAPI):
    """FastAPI, but for the calls that clients poll: those are answered from bytes before any routing."""

    def __init__(
        self,
        settings: ServerSettings,
        statistics: Statistics,
        leases: LeaseCalls,
        events: Streams,
        **options: object,
    ) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.settings = settings
        self.statistics = statistics
        self.authority = leases.authority
        self.tokens = leases.tokens
        self._leases = leases
        self._admin = AdminCalls(leases, prefix=settings.api_prefix, node=settings.gpu_pool_node)
        past = {"prefix": settings.api_prefix, "node": settings.gpu_pool_node}
        usage = UsageCalls(leases.authority, lambda: Accounts(journal_path(settings)), **past)
        timeline = TimelineCalls(leases.authority, lambda: Accounts(journal_path(settings)), **past)
        self.peers = PeerCalls(settings.gpu_pool_peers, own_id=leases.authority.id, prefix=settings.api_prefix)
        self._found_by = [calls.find for calls in (leases, self._admin, usage, timeline, self.peers)]
        data = PageData(settings, leases, usage, timeline, self.peers)
        self.page = PageCalls(leases, data, prefix=settings.api_prefix)
        self._events = events
        self._events_path = f"{settings.api_prefix}/events"
        self._found_by.append(self._find_events)
        self.why_not_started: str | None = None
        self._polled: dict[str, Callable[[], bytes]] = {
            f"{settings.api_prefix}/gpu/stats": statistics.stats,
            f"{settings.api_prefix}/gpu/count": statistics.count,
            f"{settings.api_prefix}/gpu/summary": statistics.summary,
        }
        self._headers = [(b"content-type", JSON.encode())]
        if settings.enable_cors:
            self._headers.append((b"access-control-allow-origin", b"*"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a polled call at once, a lease call by the short way, and leave the rest to FastAPI."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, self._in_a_line(send))
            return
        path = scope["path"]
        if path == self._events_path and scope["method"] in {"GET", "HEAD"}:
            await self._events.serve(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server drops the body by itself
        method = scope["method"]
        body_of = self._polled.get(path) if method == "GET" else None
        if body_of is None:
            answer = next(filter(None, (find(method, path) for find in self._found_by)), None)
            if answer is not None:
                await self._leases.serve(answer, scope, receive, send)
            elif self.page.is_mine(path):
                await self.page.serve(scope, receive, send)
            elif method == "GET" and (place := self._way_below_prefix(path, scope)) is not None:
                await Response(status_code=307, headers={"Location": place, "Vary": "Accept"})(scope, receive, send)
            else:
                await super().__call__(scope, receive, send)
            return
        body = body_of()
        headers = [*self._headers, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _way_below_prefix(self, path: str, scope: Scope) -> str | None:
        """Where to go from an address that is only on the way to ours. Told relatively: a proxy may know us by others."""
        prefix = self.settings.api_prefix
        if prefix and path == prefix:
            return f"{prefix.rpartition('/')[2]}/"
        is_for_page = bool(prefix) and path == "/" and wants_page(merge_headers(scope["headers"]).get("accept"))
        return f"{prefix.lstrip('/')}/ui" if is_for_page else None

    def _find_events(self, method: str, path: str) -> Callable[[Call], Awaitable[Reply]] | None:
        """Only what is no stream gets this far."""
        return not_possible(method, path, ("GET",)) if path == self._events_path else None

    def openapi(self) -> dict[str, Any]:
        """The document, with errors described as the kind they are."""
        if self.openapi_schema is None:
            # To describe the calls that are not answered by FastAPI takes longer than anything else at the start would.
            from .calls.lease_docs import make_lease_docs  # noqa: PLC0415

            self.include_router(make_lease_docs(), prefix=self.settings.api_prefix)
            problem = {"$ref": "#/components/schemas/Problem"}
            for path in super().openapi()["paths"].values():
                for call in path.values():
                    for answer in call["responses"].values():
                        content = answer.get("content", {})
                        if content.get("application/json", {}).get("schema") == problem:
                            content["application/problem+json"] = content.pop("application/json")
        return super().openapi()

    def _in_a_line(self, send: Send) -> Send:
        """Tell why the server cannot start without a traceback, where the reason says it all."""

        async def send_in_a_line(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and self.why_not_started is not None:
                message = {**message, "message": f"The server cannot start: {self.why_not_started}"}
            await send(message)

        return send_in_a_line


def create_app(settings: ServerSettings | None = None, make_probe: Callable[[], Probe] | None = None) -> PoolApp:
    """The application, by the environment's settings unless others are given."""
    settings = settings or ServerSettings.load()
    node, simulated = settings.gpu_pool_node, settings.simulated_gpus
    made_up = SimulatedProbe(node, simulated) if simulated and make_probe is None else None

    def on_look(snapshot: Snapshot, is_regular: bool) -> None:  # noqa: FBT001 - a callback
        authority.observe(snapshot, is_regular=is_regular)

    sampler = Sampler(
        make_probe or (lambda: made_up or choose_probe(node, None)),
        interval_s=settings.refresh_interval,
        max_history=settings.max_history,
        visible_devices=settings.cuda_visible_devices,
        clock=boot_time,
        on_look=on_look,
    )
    authority = Authority(
        settings.pool_settings(),
        Machine.here(),
        sampler,
        lambda: SqliteJournal(journal_path(settings), durability=settings.gpu_pool_durability),
        node=node,
        max_waiting=settings.gpu_pool_max_waiting,
        simulated=made_up,
    )
    statistics = Statistics(sampler, settings, authority)
    leases = LeaseCalls(
        authority,
        settings.load_tokens(),
        prefix=settings.api_prefix,
        node=node,
        is_open_to_pages=settings.enable_cors,
    )
    events = Streams(authority, is_open_to_pages=settings.enable_cors)

    def stop_waiting() -> None:
        """Nobody who waits for something may keep the server from stopping."""
        authority.driver.release_waiters()
        events.close()
        app.page.stop()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        configure_logging_where_nobody_has(settings)
        raise_limit()
        sampler.start()
        await asyncio.to_thread(sampler.wait_for_first_look, FIRST_LOOK_S)
        _tell_what_is_there(sampler)
        try:
            await authority.start()
        except JournalInUse as error:
            app.why_not_started = str(error)
            sampler.stop()
            raise
        with when_asked_to_stop(stop_waiting):
            watch = asyncio.create_task(_tell_when_it_grows_stale(statistics, events))
            notify("READY=1")
            yield
            notify("STOPPING=1")
            watch.cancel()
            await app.peers.close()
            await app.page.close()
        stop_waiting()
        authority.stop()
        sampler.stop()

    app = PoolApp(
        settings,
        statistics,
        leases,
        events,
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


def journal_path(settings: ServerSettings) -> Path:
    """Where the leases are written. GPUs that are not there have a journal of their own."""
    folder = state_dir(settings.gpu_pool_state_dir, os.environ, platform=sys.platform, uid=os.getuid())
    if settings.simulated_gpus is None:
        return folder / "leases.sqlite3"
    node = "".join(sign if sign.isalnum() or sign in "._-" else "_" for sign in settings.gpu_pool_node)
    return folder / f"simulated-{node}.sqlite3"


async def _tell_when_it_grows_stale(statistics: Statistics, events: Streams) -> None:
    """The thread that looks cannot say that it hangs; this one can. It also shows those who listen what was measured."""
    was_stale = False
    shown: Snapshot | None = None
    while True:
        await asyncio.sleep(min(statistics.settings.refresh_interval, 1.0))
        if statistics.sampler.snapshot is not shown:
            shown = statistics.sampler.snapshot
            events.show(shown)
        why = statistics.why_stale()
        if why is not None and not was_stale:
            logger.warning("%s", why)
        was_stale = why is not None
