"""Looking at one server again and again, for `gpu-pool top`: it may be down, come back, or take its time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any, NoReturn

from gpu_worker_pool.cli.pools.reading import ask_pool
from gpu_worker_pool.cli.pools.report import GpuName, PoolReport
from gpu_worker_pool.cli.pools.servers import Answer, Servers

from .frame import Frame, GpuRow, ServerState, without_twins

# As many readings of each GPU as the widest sparkline shows, and some.
KEPT_READINGS = 120
# So many of those who wait, at all servers together, fill any screen; the number of the others is known.
MOST_QUEUED = 300

_Key = str | int | None


class Watch:
    """One server: its last report and the last readings. `on_change` is called when there is news of it. `is_complete`:
    all who wait are asked for, however many they are.
    """

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
        self._stats: Mapping[_Key, Mapping[str, Any]] = {}
        self._read_at: object = None
        self._percents: dict[_Key, deque[float | None]] = {}
        # Set when it is known for the first time whether it answers.
        self.is_known = asyncio.Event()

    async def run(self) -> NoReturn:
        """Look every interval, counted from look to look; never ends by itself, whatever the server does."""
        due = monotonic()
        while True:
            await self._poll()
            due = max(due + self._interval_s, monotonic())
            await asyncio.sleep(due - monotonic())

    def state(self) -> ServerState:
        """What is known of it now."""
        url = self._servers.config.endpoints[self._endpoint].url
        if self._report is None:
            return ServerState(self._endpoint, url, error=self._error)
        age_s = monotonic() - self._answered_at
        is_stale = self._error is not None or age_s > max(3 * self._interval_s, self._interval_s + 2)
        rows = tuple(self._row(index, is_stale=is_stale) for index in range(len(self._report.gpus)))
        return ServerState(self._endpoint, url, self._report, rows, age_s, self._error, is_stale)

    async def _poll(self) -> None:
        # The pool tells all but temperature and power, and those matter least: without them the rest is still shown.
        report, stats = await asyncio.gather(
            ask_pool(self._servers, self._endpoint, self._query),
            self._servers.ask(self._endpoint, "/gpu/stats"),
        )
        is_new = self._report is None or self._error is not None
        self._error = report.error
        if report.is_up:
            self._report, self._answered_at = report, monotonic()
            self._stats = {_key(item): item for item in _objects(stats, "gpus")}
            self._sample(report, stats)
        self._on_change()
        if is_new and report.is_up:
            # What was before we looked, or while it did not answer us.
            self._recall(await self._servers.ask(self._endpoint, "/gpu/history"))
            self._on_change()
        self.is_known.set()

    def _sample(self, report: PoolReport, stats: Answer) -> None:
        read_at = stats.data.get("timestamp") if stats.is_ok and isinstance(stats.data, dict) else None
        if read_at is not None and read_at == self._read_at:
            return  # we look more often than the server does
        self._read_at = read_at
        for gpu in report.gpus:
            kept = self._percents.setdefault(_key_of(gpu.gpu), deque(maxlen=KEPT_READINGS))
            kept.append(gpu.utilization_percent)

    def _recall(self, history: Answer) -> None:
        for gpu in _objects(history, "gpus"):
            readings = gpu.get("readings")
            if isinstance(readings, list) and readings:
                percents = (_number(item, "utilization_percent") for item in readings if isinstance(item, dict))
                self._percents[_key(gpu)] = deque(percents, maxlen=KEPT_READINGS)

    def _row(self, index: int, *, is_stale: bool) -> GpuRow:
        assert self._report is not None  # noqa: S101 - asked for where there is one
        gpu = self._report.gpus[index]
        stats = self._stats.get(_key_of(gpu.gpu), {})
        power = stats.get("power")
        return GpuRow(
            gpu,
            temperature_c=_number(stats, "temperature_c"),
            power_draw_w=_number(power, "draw_w"),
            power_limit_w=_number(power, "limit_w"),
            utilization_percents=tuple(self._percents.get(_key_of(gpu.gpu), ())),
            is_stale=is_stale,
        )


def frame_of(watches: Sequence[Watch], interval_s: float) -> Frame:
    """What is known of all of them now."""
    return Frame(without_twins([watch.state() for watch in watches]), datetime.now().astimezone(), interval_s)


def _key_of(gpu: GpuName) -> _Key:
    return gpu.uuid if gpu.uuid is not None else gpu.index


def _key(data: Mapping[str, Any]) -> _Key:
    """A GPU in an answer. Servers that know no UUIDs have the index."""
    found = data.get("uuid") or data.get("gpu_id")
    return found if isinstance(found, str | int) else None


def _objects(answer: Answer, key: str) -> Iterator[Mapping[str, Any]]:
    found = answer.data.get(key) if answer.is_ok and isinstance(answer.data, dict) else None
    return (item for item in (found if isinstance(found, list) else ()) if isinstance(item, dict))


def _number(data: object, key: str) -> float | None:
    """Unknown is None: what is missing, of another kind, or larger than any measurement."""
    value = data.get(key) if isinstance(data, dict) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if is_number and value is not None else None
