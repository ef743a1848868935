"""Polls one server for `gpu-pool top`: it may be down, come back, or take its time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from time import monotonic
from typing import Any, NoReturn

from gpu_worker_pool.cli.pools.reading import ask_pool
from gpu_worker_pool.cli.pools.report import GpuReport, PoolReport
from gpu_worker_pool.cli.pools.servers import FLEET, GRACE_S, ServerAnswer, Servers
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.http.grace import gather_with_grace
from gpu_worker_pool.wire.fleet import FleetList
from gpu_worker_pool.wire.reader import read, read_number
from gpu_worker_pool.wire.statistics import GpuDetail, GpuHistory, GpuStatistics

from .frame import Frame, GpuRow, ServerState, without_twins

# As many readings of each GPU as the widest sparkline shows, and some.
KEPT_READINGS = 120
# So many waiting requests, at all servers together, fill any screen; the number of the others is known.
MOST_QUEUED = 300
# So many boxes of a fleet are asked for what only they know.
MOST_BOXES = 50

_Key = str | int | None


class Watch:
    """One server: its last report and readings. `is_complete`: the whole queue is asked for, however long it is."""

    def __init__(
        self,
        servers: Servers,
        endpoint: str,
        interval_s: float,
        on_change: Callable[[], None],
        *,
        is_complete: bool = False,
    ) -> None:
        self._servers = servers
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._on_change = on_change
        self._query = "" if is_complete else f"?queue={max(MOST_QUEUED // len(servers.ids), 10)}"
        self._report: PoolReport | None = None
        self._error: str | None = None
        self._answered_at = 0.0
        self._stats: dict[_Key, GpuDetail] = {}
        self._stats_of_boxes: dict[_Key, GpuDetail] = {}
        self._read_at: str | None = None
        self._percents: dict[_Key, deque[float | None]] = {}
        # Set when the server, and the boxes of its fleet, have answered or failed for the first time.
        self.is_known = asyncio.Event()
        self._unknown = 0

    def polls(self) -> list[Coroutine[Any, Any, NoReturn]]:
        """What is to run beside each other: a box that cannot be reached does not delay what the leader says."""
        polls = [self._poll, self._poll_boxes] if self._servers.is_fleet else [self._poll]
        self._unknown = len(polls)
        return [self._repeat(poll) for poll in polls]

    async def _repeat(self, poll: Callable[[], Coroutine[Any, Any, None]]) -> NoReturn:
        """Poll every interval, counted from poll to poll; never ends by itself, whatever the server does."""
        due = monotonic()
        await poll()
        self._unknown -= 1
        if not self._unknown:
            self.is_known.set()
        while True:
            due = max(due + self._interval_s, monotonic())
            await asyncio.sleep(due - monotonic())
            await poll()

    @property
    def has_answered(self) -> bool:
        return self._report is not None

    def state(self) -> ServerState:
        url = self._servers.config.endpoints[self._endpoint].url
        if self._report is None:
            return ServerState(self._endpoint, url, error=self._error)
        age_s = monotonic() - self._answered_at
        is_stale = self._error is not None or age_s > max(3 * self._interval_s, self._interval_s + 2)
        rows = tuple(self._row(gpu, is_stale=is_stale) for gpu in self._report.gpus)
        return ServerState(self._endpoint, url, self._report, rows, age_s, self._error, is_stale)

    async def _poll(self) -> None:
        # Only temperature and power come from elsewhere than the pool: without them the rest is still shown.
        report, answer = await asyncio.gather(
            ask_pool(self._servers, self._endpoint, self._query), self._servers.ask(self._endpoint, "/gpu/stats")
        )
        is_new = self._report is None or self._error is not None
        self._error = report.error
        if report.is_up:
            self._report, self._answered_at = report, monotonic()
            stats = read(GpuStatistics, answer.data) if answer.is_ok else None
            self._stats = {gpu.uuid or gpu.gpu_id: gpu for gpu in stats.gpus} if stats else {}
            self._sample(report, stats.timestamp if stats else None)
        self._on_change()
        if is_new and report.is_up:
            # The readings from before the first poll, or from while the server did not answer.
            self._recall(await self._servers.ask(self._endpoint, "/gpu/history"))
            self._on_change()

    async def _poll_boxes(self) -> None:
        """Ask the boxes of the fleet for temperature and power, which the leader does not know."""
        answer = await self._servers.ask(self._endpoint, FLEET)
        listed = read(FleetList, answer.data) if answer.is_ok else None
        urls = [box.url for box in (listed.boxes if listed else ()) if box.url and box.state == "up"][:MOST_BOXES]
        asked = [asyncio.create_task(self._servers.ask_url(url, "/gpu/stats")) for url in urls]
        try:
            late = await gather_with_grace(asked, lambda found: found.is_ok, GRACE_S)
        finally:
            await cancel_and_wait(*asked)
        told = [read(GpuStatistics, task.result().data) for task in asked if task not in late]
        self._stats_of_boxes = {gpu.uuid or gpu.gpu_id: gpu for stats in filter(None, told) for gpu in stats.gpus}

    def _sample(self, report: PoolReport, read_at: str | None) -> None:
        if read_at is not None and read_at == self._read_at:
            return  # we poll more often than the server reads
        self._read_at = read_at
        for gpu in report.gpus:
            kept = self._percents.setdefault(gpu.key, deque(maxlen=KEPT_READINGS))
            kept.append(gpu.view.utilization_percent)

    def _recall(self, answer: ServerAnswer) -> None:
        history = read(GpuHistory, answer.data) if answer.is_ok else None
        for gpu in history.gpus if history else ():
            if gpu.readings:
                percents = (reading.utilization_percent for reading in gpu.readings)
                self._percents[gpu.uuid or gpu.gpu_id] = deque(percents, maxlen=KEPT_READINGS)

    def _row(self, gpu: GpuReport, *, is_stale: bool) -> GpuRow:
        stats = self._stats.get(gpu.key) or self._stats_of_boxes.get(gpu.key)
        return GpuRow(
            gpu,
            temperature_c=read_number(stats.temperature_c) if stats else None,
            power_draw_w=stats.power.draw_w if stats else None,
            power_limit_w=stats.power.limit_w if stats else None,
            utilization_percents=tuple(self._percents.get(gpu.key, ())),
            is_stale=is_stale,
        )


def frame_of(watches: Sequence[Watch], interval_s: float) -> Frame:
    return Frame(without_twins([watch.state() for watch in watches]), datetime.now().astimezone(), interval_s)
