"""What the page shows, made once for all who look at it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from importlib import import_module

from gpu_worker_pool.server.authority.readings_history import ReadingLines
from gpu_worker_pool.server.authority.snapshot import encode
from gpu_worker_pool.server.calls.lease_view import iso_time
from gpu_worker_pool.server.calls.leases import LeaseCalls
from gpu_worker_pool.server.calls.peers import PeerCalls
from gpu_worker_pool.server.calls.timeline import TimelineCalls
from gpu_worker_pool.server.calls.usage import UsageCalls
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.problems import Refused
from gpu_worker_pool.server.http.shared_answer import SharedAnswer
from gpu_worker_pool.server.settings import ServerSettings

from .recent_events import Happenings

# By name: the rules of imports take the package itself for its client, which the server does not load.
VERSION: str = import_module("gpu_worker_pool").__version__
MOST_QUEUED = 200
DEFAULT_HOURS = "6"
HOURS = ("1", "6", "24", "168")


class PageData:
    """All answers that pages share."""

    def __init__(
        self,
        settings: ServerSettings,
        leases: LeaseCalls,
        usage: UsageCalls,
        timeline: TimelineCalls,
        peers: PeerCalls,
    ) -> None:
        self._settings = settings
        self._leases = leases
        self._authority = leases.authority
        self._sampler = leases.authority.sampler
        self._happenings = Happenings(leases.authority.driver)
        self._started_at = iso_time(time.time())
        self._has_peers = peers.has_peers
        self._lines = ReadingLines(settings.max_history)
        self._timelines = {
            hours: SharedAnswer(partial(timeline.timeline, float(hours)), 5.0, may_be_old=True) for hours in HOURS
        }
        self._shared = {
            "pool": SharedAnswer(self._pool, 0.5),
            "history": SharedAnswer(self._history, 2.0, may_be_old=True),
            "usage": SharedAnswer(usage.usage_today, 10.0, may_be_old=True),
            "peers": SharedAnswer(peers.peers, 1.0, may_be_old=True),
        }

    def find(self, name: str, call: Call) -> SharedAnswer | None:
        """The answer of this name; None where there is none, and Refused where the query is no good."""
        if name == "timeline":
            return self._timelines[_hours(call.query("hours"))]
        found = self._shared.get(name)
        if found is not None:
            call.query()
        return found

    def stop(self) -> None:
        """Answer nobody any more."""
        for answer in (*self._shared.values(), *self._timelines.values()):
            answer.stop()

    async def close(self) -> None:
        """Leave nothing running."""
        for answer in (*self._shared.values(), *self._timelines.values()):
            await answer.close()

    async def _pool(self) -> bytes:
        pool = await self._leases.pool(MOST_QUEUED)
        settings, sampler = self._settings, self._sampler
        rest = encode(
            {
                "now": iso_time(self._now()),
                "started_at": self._started_at,
                "measured_at": sampler.snapshot.taken.timestamp(),
                "reading_age_s": round(sampler.age_s(), 3) if sampler.has_looked else None,
                "stale_after_s": settings.stale_after_s,
                "refresh_interval_s": settings.refresh_interval,
                "max_history": settings.max_history,
                "happened": self._happenings.views(),
                "has_peers": self._has_peers,
                "has_tokens": not self._leases.tokens.is_unset,
                "title": settings.title,
                "docs": settings.docs_url.lstrip("/") or None,
                "version": VERSION,
            }
        )
        return b'{"pool":%b,%b' % (pool, rest[1:])

    def _now(self) -> float:
        """By the clock that the leases' times are written by; before those are known, by the wall."""
        driver = self._authority.driver
        return driver.now() + driver.state.wall_offset_s if driver.is_open else time.time()

    async def _history(self) -> bytes:
        snapshots = list(self._sampler.history)
        return await asyncio.to_thread(self._lines.encode, snapshots)


def _hours(query: Mapping[str, str]) -> str:
    hours = query.get("hours", DEFAULT_HOURS)
    if hours not in HOURS:
        raise Refused(422, f"hours: {hours[:40]!r} is none of {', '.join(HOURS)}.")
    return hours
