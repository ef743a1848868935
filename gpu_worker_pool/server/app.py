"""The application: makes its parts, connects them, and starts and stops them."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from gpu_worker_pool.gpus.choose import choose_probe
from gpu_worker_pool.gpus.probe import Probe
from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.host.addresses import urls
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.connections import raise_limit
from gpu_worker_pool.host.gpu_lock import GpuLocks
from gpu_worker_pool.host.processes import Machine
from gpu_worker_pool.host.state_dir import StateDirError
from gpu_worker_pool.host.systemd import notify, when_asked_to_stop
from gpu_worker_pool.host.users import User, Users
from gpu_worker_pool.ledger.accounts import Accounts, SqliteAccounts
from gpu_worker_pool.ledger.journal import JournalInUse

from .agent.frames import PATH as AGENT_PATH
from .authority.journal_sources import OwnJournal
from .authority.pool import Pool
from .box.sampler import Sampler
from .box.snapshot import Snapshot
from .fleet import FleetUnusable, fleet_database, fleet_url, keep_key
from .hooks import Hooks, load_rules
from .http.access import AccessRules
from .http.forwarding import Forwarding
from .http.front import READABLE, PolledStatistics, check_head, nowhere
from .http.pool_route import PoolRoute, write
from .http.response import Refusal, problem_of
from .http.shared_answer import SharedAnswers
from .logs import configure_logging_if_unset
from .own_history import prepare_files
from .routes import accounting, admin, events, fleet, leases, page, plans, statistics
from .routes.accounting import PastLeases
from .routes.docs import describe, docs_router
from .routes.events import Streams
from .routes.page import PageData, PageFiles
from .routes.renewals import FleetRenewals
from .routes.statistics import Statistics
from .settings import ServerSettings
from .state_files import journal_name, journal_path, open_journal

if TYPE_CHECKING:
    from gpu_worker_pool.ledger.postgres.database import PostgresDatabase

    from .fleet_part import FleetPart

logger = logging.getLogger(__name__)

# How long to wait for the first reading before answering; a probe that hangs must not keep the server from starting.
FIRST_SAMPLE_S = 2.0
# The calls that uvicorn has ended are answered in this number of turns of the loop, before a disk that hangs can hold it up.
TURNS_TO_ANSWER = 3
# In the order of the home page.
ROUTERS = (
    statistics.router,
    page.router,
    leases.router,
    events.router,
    accounting.router,
    plans.router,
    admin.router,
)


class PoolApp(FastAPI):
    """The application of one box. `why_not_started` is the reason of a failed start, if a sentence says it all."""

    def __init__(
        self,
        settings: ServerSettings,
        make_probe: Callable[[], Probe] | None = None,
        machine: Machine | None = None,
        look_up_user: Callable[[int], User] | None = None,
    ) -> None:
        super().__init__(
            title=settings.title,
            version=settings.version,
            description=settings.description,
            openapi_url=None,  # the pages of the documentation are routes of ours, which work without the internet
            redirect_slashes=False,
        )
        self.settings = settings
        self.is_stopping = False
        self.tokens = settings.load_tokens()
        users = Users(settings.gpu_pool_admin_group, settings.gpu_pool_operator_group, look_up=look_up_user)
        for why in users.why_no_members():
            logger.error("%s", why)
        self.access = AccessRules(
            self.tokens,
            takes_loopback=settings.gpu_pool_local == "loopback",
            administrators=users.administrators(),
            operators=users.operators(),
        )
        self.why_not_started: str | None = None
        # The port that it listens on, once that is known.
        self.port = settings.port
        self._database: PostgresDatabase | None = None
        self._fleet: FleetPart | None = None
        self._is_in_fleet = bool(fleet_url(settings))
        self.websocket_path = f"{settings.api_prefix}{AGENT_PATH}" if self._is_in_fleet else None
        node, simulated = settings.gpu_pool_node, settings.simulated_gpus
        simulated_probe: SimulatedProbe | None = None
        if simulated and make_probe is None:
            simulated_probe = SimulatedProbe(node, simulated, outsiders=settings.simulated_outsiders)
        url = urls(settings.host, settings.port, settings.api_prefix, names=())[0]
        self.locks = GpuLocks(url, journal=journal_name(settings))
        self._sampler = Sampler(
            make_probe or (lambda: simulated_probe or choose_probe(node, None)),
            interval_s=settings.refresh_interval,
            max_history=settings.max_history,
            visible_devices=settings.cuda_visible_devices,
            clock=boot_time,
            on_sample=self._on_sample,
            locks=self.locks,
        )
        self.pool = Pool(
            settings.pool_settings(),
            machine or Machine.here(),
            self._sampler,
            node=node,
            max_waiting=settings.gpu_pool_max_waiting,
            simulated=simulated_probe,
            is_in_fleet=self._is_in_fleet,
        )
        self._simulated = simulated_probe
        self.tokens.added = lambda: self.pool.state.tokens if self._fleet is None else self._fleet.added_tokens()
        self.pool.follow(self.tokens.note)
        self.statistics = Statistics(self._sampler, settings, self.pool)
        self._streams = Streams(self.pool)
        self._hooks = Hooks(
            self.pool, load_rules(settings.gpu_pool_hooks_file), reads_every_s=settings.refresh_interval
        )
        past = PastLeases(self.pool, self._open_accounts)
        self._forwarding = Forwarding(self.pool, lambda: self.pool.membership, prefix=settings.api_prefix)
        self._renewals = FleetRenewals(self.pool, self.tokens, self._forwarding)
        self._shared = SharedAnswers()
        page_data = PageData(settings, self.pool, self._sampler, self._shared, self._streams, self.tokens)
        parts = (
            settings,
            self.access,
            users,
            self.pool,
            past,
            self.statistics,
            self._forwarding,
            self._renewals,
            self._shared,
            self._streams,
            page_data,
            PageFiles(),
        )
        self.parts: Mapping[type, object] = {type(part): part for part in parts}
        with_cors = settings.enable_cors
        # The first route that matches a path answers, and leases are called for most often.
        for router in sorted((*ROUTERS, docs_router(settings)), key=lambda each: each is not leases.router):
            router.add_to(self, prefix=settings.api_prefix, with_cors=with_cors)
        for router in (fleet.router, *ROUTERS):
            router.add_to(self, prefix=settings.api_prefix, is_fleet=router is not fleet.router)
        self.router.default = self._answer_nowhere
        polled = {f"{settings.api_prefix}{path}": body for path, body in self.statistics.polled().items()}
        self._http = PolledStatistics(self.router, polled, (READABLE,) if with_cors else ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve without FastAPI's own middleware: each route turns every error into an answer itself."""
        scope["app"] = self
        if scope["type"] == "http":
            try:
                check_head(scope)
            except Refusal as refused:
                await write(problem_of(refused), (), scope, send)
            else:
                await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._fleet is None or scope["path"] != self.websocket_path:
            await send({"type": "websocket.close"})
        else:
            await self._fleet.endpoint(scope, receive, send)

    async def _answer_nowhere(self, scope: Scope, _: Receive, send: Send) -> None:
        """Answer a call of which no route knows the path."""
        statistics_paths = [
            route.path_regex
            for route in self.routes
            if isinstance(route, PoolRoute) and route.declared.is_readable_everywhere
        ]
        answer = nowhere(
            scope, self.settings.api_prefix, lambda path: any(each.match(path) for each in statistics_paths)
        )
        await write(answer, (), scope, send)

    @cached_property
    def endpoints(self) -> Mapping[str, str]:
        """What the home page says of each call, by its path."""
        prefix, settings = self.settings.api_prefix, self.settings
        routers = (*ROUTERS, *((fleet.router,) if self.pool.membership else ()), docs_router(settings))
        return {
            f"{prefix}{declared.path.replace(':path}', '}').replace('{lease_id}', '{id}')}": declared.help
            for router in routers
            for declared in router.declared
            if declared.help
        }

    def _on_sample(self, snapshot: Snapshot, is_regular: bool) -> None:  # noqa: FBT001 - a callback
        self.pool.observe(snapshot, is_regular=is_regular)
        if self._fleet is not None:
            self._fleet.agent.observe(snapshot)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = describe(self, self.settings)
        return self.openapi_schema

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        configure_logging_if_unset(self.settings)
        raise_limit()
        try:
            await asyncio.to_thread(keep_key, self.settings)
            self._database = fleet_database(self.settings)
            fence = await asyncio.to_thread(prepare_files, self.settings)
            if self._is_in_fleet:
                self._fleet = part = await self._join_fleet(fence)
                await self.pool.start(part.source, part.agent)
            else:
                self.pool.note_fence(fence)
                await self.pool.start(OwnJournal(self.pool, partial(open_journal, self.settings)))
        except (JournalInUse, StateDirError, FleetUnusable) as error:
            self.why_not_started = str(error)
            self.locks.close()
            raise
        # After the journal is open: earlier readings would be void.
        self._sampler.start()
        await asyncio.to_thread(self._sampler.wait_for_first_sample, FIRST_SAMPLE_S)
        self.statistics.log_gpus(FIRST_SAMPLE_S)
        if self._fleet is not None:
            await self._fleet.start()
        with when_asked_to_stop(self._stop_waiting):
            watch = asyncio.create_task(self.statistics.watch(self._streams.note_snapshot))
            unix_groups = asyncio.create_task(plans.follow_unix_groups(self.pool))
            self._hooks.start()
            notify("READY=1")
            yield
            notify("STOPPING=1")
            if (said := self.pool.goes_on_without()) is not None:
                logger.warning("%s", said)
            watch.cancel()
            unix_groups.cancel()
            self._stop_waiting()
            for _ in range(TURNS_TO_ANSWER):
                await asyncio.sleep(0)
        if self._fleet is not None:
            await self._fleet.agent.stop()
        await self.pool.stop()
        await self._hooks.stop()
        self._sampler.stop()
        self.locks.close()

    async def _join_fleet(self, least_fence: int) -> FleetPart:
        from .fleet_part import join_fleet  # noqa: PLC0415 - it loads what a server without a fleet does not need

        return await join_fleet(
            self.settings,
            self.pool,
            self._sampler,
            app=self,
            port=self.port,
            database=self._database,
            tokens=self.tokens,
            renewals=self._renewals,
            simulated=self._simulated,
            least_fence=least_fence,
        )

    def _open_accounts(self) -> Accounts:
        return SqliteAccounts(journal_path(self.settings)) if self._database is None else self._database.accounts()

    def _stop_waiting(self) -> None:
        """Answer all calls that wait: they must not keep the server from stopping."""
        self.is_stopping = True
        self.pool.release_waiters()
        if self._fleet is not None:
            self._fleet.agent.release_waiters()
        self._streams.close()
        self._shared.stop()
        self._forwarding.stop()

    async def _live(self, receive: Receive, send: Send) -> None:
        """Start and stop as the server says. A start that failed is told by `why_not_started`, else by its traceback."""
        now = "startup"
        await receive()
        try:
            async with self.running():
                await send({"type": "lifespan.startup.complete"})
                now = "shutdown"
                await receive()
        except BaseException:
            why = self.why_not_started
            message = traceback.format_exc() if why is None else f"The server cannot start: {why}"
            await send({"type": f"lifespan.{now}.failed", "message": message})
            raise
        await send({"type": "lifespan.shutdown.complete"})


def create_app(
    settings: ServerSettings | None = None,
    make_probe: Callable[[], Probe] | None = None,
    machine: Machine | None = None,
    look_up_user: Callable[[int], User] | None = None,
) -> PoolApp:
    """Make the application. The settings are those of the environment, the machine is this one, and users are looked up in
    its directory, unless given.
    """
    return PoolApp(settings or ServerSettings.load(), make_probe, machine, look_up_user)
