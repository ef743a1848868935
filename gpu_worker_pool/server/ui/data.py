"""The data of the page, made once for all open pages."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.agent.handshake import VERSION
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.box.sampler import Sampler
from gpu_worker_pool.server.box.snapshot import ReadingLines
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.http.shared_answer import SharedAnswers
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.server.routes.accounting import PastLeases
from gpu_worker_pool.server.routes.fleet import box_views
from gpu_worker_pool.server.routes.quotas import quota_list
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.views.pool_view import pool_view
from gpu_worker_pool.server.views.target import Target
from gpu_worker_pool.wire.page import PageView

from .recent_events import RecentEvents

MOST_QUEUED = 200
# A body up to this size is compressed in the event loop: a thread would take longer.
SMALL_BYTES = 4096


class Body(NamedTuple):
    plain: bytes
    gzipped: bytes

    @classmethod
    async def of(cls, plain: bytes) -> Body:
        """Compress the answer; a large one in a thread."""
        compress = partial(gzip.compress, plain, 1, mtime=0)
        return cls(plain, compress() if len(plain) <= SMALL_BYTES else await asyncio.to_thread(compress))


class PageData:
    """All answers that pages share. `tokens` are those of the server."""

    def __init__(
        self,
        settings: ServerSettings,
        pool: Pool,
        sampler: Sampler,
        shared: SharedAnswers,
        *,
        past: PastLeases,
        tokens: Tokens,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._sampler = sampler
        self._shared = shared
        self._past = past
        self._recent_events = RecentEvents(lambda: pool.state)
        pool.follow(self._recent_events.follow)
        self._started_at = iso_time(time.time())
        self._tokens = tokens
        self._lines = ReadingLines(settings.max_history)

    async def pool(self, scope: Target) -> Body:
        return await self._get("pool", scope, self._make_pool, 0.5, may_be_old=False)

    async def history(self, scope: Target) -> Body:
        return await self._get("history", scope, self._make_history, 2.0)

    async def usage(self, scope: Target) -> Body:
        return await self._get("usage", scope, self._past.usage_today, 10.0)

    async def quotas(self, scope: Target) -> Body:
        return await self._get("quotas", scope, self._make_quotas, 2.0)

    async def timeline(self, scope: Target, hours: str) -> Body:
        return await self._get(f"timeline {hours}", scope, partial(self._past.timeline, float(hours)), 5.0)

    async def weeks(self, scope: Target, number: str) -> Body:
        # Weeks of leases take seconds to read, and change slowly.
        return await self._get(f"weeks {number}", scope, partial(self._past.weeks, int(number)), 60.0)

    async def _get(
        self,
        name: str,
        scope: Target,
        make: Callable[[Target], Awaitable[bytes]],
        pace_s: float,
        *,
        may_be_old: bool = True,
    ) -> Body:
        async def compressed() -> Body:
            return await Body.of(await make(scope))

        return await self._shared.get((name, scope), compressed, pace_s, may_be_old=may_be_old)

    async def _make_pool(self, scope: Target) -> bytes:
        pool = await pool_view(self._pool, scope, MOST_QUEUED)
        settings, sampler = self._settings, self._sampler
        view = PageView(
            pool=pool,
            # By the clock of the leases' times; by the wall clock before the journal is open.
            now=iso_time(self._pool.wall_now() if self._pool.is_open else time.time()),
            started_at=self._started_at,
            measured_at=sampler.snapshot.taken.timestamp(),
            reading_age_s=round(sampler.age_s(), 3) if sampler.has_sampled else None,
            stale_after_s=settings.stale_after_s,
            refresh_interval_s=settings.refresh_interval,
            max_history=settings.max_history,
            happened=self._recent_events.views(scope),
            has_tokens=not self._tokens.is_unset,
            title=settings.title,
            docs=settings.docs_url.lstrip("/") or None,
            version=VERSION,
            boxes=None if self._pool.membership is None else box_views(self._pool),
        )
        return encode(view)

    async def _make_quotas(self, scope: Target) -> bytes:
        return encode(await quota_list(self._pool, scope))

    async def _make_history(self, _: Target) -> bytes:
        snapshots = list(self._sampler.history)
        return await asyncio.to_thread(self._lines.encode, snapshots)
