"""The data of the page, made once for all open pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import get_args

from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.box.readings_history import ReadingLines
from gpu_worker_pool.server.box.sampler import Sampler
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.http.shared_answer import Body, SharedAnswers
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.server.parameters import PageHours, PageWeeks
from gpu_worker_pool.server.routes.accounting import PastLeases
from gpu_worker_pool.server.routes.fleet import box_views
from gpu_worker_pool.server.routes.quotas import quota_list
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.version import VERSION
from gpu_worker_pool.server.views.pool_view import pool_view
from gpu_worker_pool.server.views.target import Target
from gpu_worker_pool.wire.page import PageView

from .recent_events import RecentEvents

MOST_QUEUED = 200
HOURS = get_args(get_args(PageHours)[0])
WEEKS = get_args(get_args(PageWeeks)[0])
# A page shows one box or the whole fleet; of more boxes than this the pages do not share their data.
MOST_SCOPES = 64


class ScopedAnswer:
    """An answer that is shared by all pages with the same scope."""

    def __init__(self, make: Callable[[Target], Awaitable[bytes]], pace_s: float, *, may_be_old: bool = False) -> None:
        self._make = make
        self._shared = SharedAnswers(pace_s, MOST_SCOPES, may_be_old=may_be_old, is_compressed=True)
        self.stop = self._shared.stop
        self.close = self._shared.close

    async def get(self, scope: Target) -> Body:
        return await self._shared.get_body(scope, partial(self._make, scope))


class PageData:
    """All answers that pages share. `tokens` are those of the server."""

    def __init__(
        self,
        settings: ServerSettings,
        pool: Pool,
        sampler: Sampler,
        *,
        past: PastLeases,
        tokens: Tokens,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._sampler = sampler
        self._recent_events = RecentEvents(lambda: pool.state)
        pool.follow(self._recent_events.follow)
        self._started_at = iso_time(time.time())
        self._tokens = tokens
        self._lines = ReadingLines(settings.max_history)
        self.timelines = {
            hours: ScopedAnswer(partial(past.timeline, float(hours)), 5.0, may_be_old=True) for hours in HOURS
        }
        # Weeks of leases take seconds to read, and change slowly.
        self.weeks = {number: ScopedAnswer(partial(past.weeks, int(number)), 60.0, may_be_old=True) for number in WEEKS}
        self.pool = ScopedAnswer(self._make_pool, 0.5)
        self.history = ScopedAnswer(self._make_history, 2.0, may_be_old=True)
        self.usage = ScopedAnswer(past.usage_today, 10.0, may_be_old=True)
        self.quotas = ScopedAnswer(self._make_quotas, 2.0, may_be_old=True)
        by_span = (*self.timelines.values(), *self.weeks.values())
        self._all = (self.pool, self.history, self.usage, self.quotas, *by_span)

    def stop(self) -> None:
        for answer in self._all:
            answer.stop()

    async def close(self) -> None:
        for answer in self._all:
            await answer.close()

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
