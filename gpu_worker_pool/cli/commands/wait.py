"""`gpu-pool wait`: until GPUs are free, without taking them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import Final

import typer

from gpu_worker_pool.cli.failure import TIMED_OUT, Failure
from gpu_worker_pool.cli.options import Endpoints, FleetScope, Gpus, Json, MemoryPerGpu, Model, Timeout
from gpu_worker_pool.cli.output import complain, out, print_json
from gpu_worker_pool.cli.pools.reading import ask_pool
from gpu_worker_pool.cli.pools.report import GpuReport, PoolReport, by_node, check_any_is_up, show_gpus
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.status_line import StatusLine
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.cli.units import show_duration
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.model.units import MB_PER_GB, show_mb

POLL_S: Final = 1.0
# Every server has at least so long for its first answer, however short the timeout is.
FIRST_POLL_S: Final = 2.0


class WantedGpus(Wishes):
    def free_in(self, report: PoolReport) -> tuple[GpuReport, ...] | None:
        """As many free GPUs as are wanted, all on one node; None where there are too few."""
        if not report.is_up or report.view.can_grant is False:
            return None
        for _, gpus in by_node(report):
            free = [gpu for gpu in gpus if self._fits(gpu) and self._is_free(gpu, report)]
            if len(free) >= self.gpus:
                return tuple(free[: self.gpus])
        return None

    def could_come(self, report: PoolReport) -> bool:
        """Whether this endpoint has as many as are wanted, free or not."""
        fitting = (
            sum(self._fits(gpu) and self._has_room(gpu, 0.0, report) for gpu in gpus) for _, gpus in by_node(report)
        )
        return max(fitting, default=0) >= self.gpus

    def standing_in(self, report: PoolReport) -> str:
        """How many of the GPUs that fit are free now; where memory is missing, how much of it there is."""
        if not report.is_up:
            return "down"
        if report.view.can_grant is False:
            return f"grants nothing now: {report.view.trouble or 'it does not say why'}"
        fitting = [gpu for gpu in report.gpus if self._fits(gpu)]
        standing = f"{sum(self._is_free(gpu, report) for gpu in fitting)} of {len(fitting)} free"
        open_ = [gpu for gpu in fitting if gpu.view.state in {"free", "shared"}]
        if self.memory_mb is None or len(open_) < self.gpus or self.free_in(report) is not None:
            return standing
        rooms = sorted((_room_mb(gpu, gpu.view.memory_committed_mb, report) or 0.0 for gpu in open_), reverse=True)
        # Each of the wanted number of GPUs has at least this much.
        fits = f"; {_at_most(rooms[self.gpus - 1])} would fit now" if rooms[self.gpus - 1] >= 1 else ""
        return f"{standing} with so much room under {_threshold(report)}{fits}"

    def most_mb(self, report: PoolReport) -> float | None:
        """The most memory that one of the GPUs that fit otherwise can ever grant; None where that is not known."""
        rooms = [room for gpu in report.gpus if self._fits(gpu) and (room := _room_mb(gpu, 0.0, report)) is not None]
        return max(rooms, default=None)

    def _fits(self, gpu: GpuReport) -> bool:
        return self.model is None or (gpu.view.name is not None and matches_model(self.model, gpu.view.name))

    def _is_free(self, gpu: GpuReport, report: PoolReport) -> bool:
        if self.memory_mb is None:
            return gpu.view.state == "free"
        # A request that names an amount can also have what is left of a shared GPU.
        return gpu.view.state in {"free", "shared"} and self._has_room(gpu, gpu.view.memory_committed_mb, report)

    def _has_room(self, gpu: GpuReport, committed_mb: float | None, report: PoolReport) -> bool:
        if self.memory_mb is None:
            return True
        room_mb = _room_mb(gpu, committed_mb, report)
        return room_mb is not None and self.memory_mb <= room_mb


def _room_mb(gpu: GpuReport, committed_mb: float | None, report: PoolReport) -> float | None:
    """What is left of a GPU's memory below the threshold; None where that is not known."""
    total_mb, percent = gpu.view.memory_total_mb, report.view.thresholds.memory_percent
    if total_mb is None or committed_mb is None:
        return None
    return total_mb * (100.0 if percent is None else percent) / 100 - committed_mb


def _at_most(memory_mb: float) -> str:
    """The amount, or a little less: what is shown must fit."""
    tenths = floor(memory_mb * 10 / MB_PER_GB)
    return show_mb(floor(memory_mb) if tenths < 100 else tenths * MB_PER_GB / 10)


def _threshold(report: PoolReport) -> str:
    percent = report.view.thresholds.memory_percent
    return "the memory threshold" if percent is None else f"the memory threshold ({percent:g} %)"


@dataclass(frozen=True, slots=True)
class TimeOver:
    """What was known of each server when the time was over; nothing of servers that had not answered."""

    reports: Sequence[PoolReport]
    silent: Sequence[str]

    def in_words(self, wanted: WantedGpus, timeout_s: float) -> str:
        """For the user: a GPU of a silent server is not called busy."""
        if not any(report.is_up for report in self.reports):
            within = _within(max(timeout_s, FIRST_POLL_S))
            names = [*self.silent, *(f"{report.endpoint} ({report.error})" for report in self.reports)]
            return f"no GPU server answered {within}, so it is not known what is free: {', '.join(names)}"
        standing = [f"{report.endpoint}: {wanted.standing_in(report)}" for report in self.reports]
        standing += [f"{endpoint}: no answer yet" for endpoint in self.silent]
        return f"not free {_within(timeout_s)}: {wanted} ({'; '.join(standing)})"


def _within(seconds: float) -> str:
    return f"within {seconds:g}s" if seconds < 60 else f"within {show_duration(seconds)}"


def wait(
    endpoint: Endpoints = None,
    *,
    gpus: Gpus = 1,
    memory: MemoryPerGpu = None,
    model: Model = None,
    timeout: Timeout = None,
    fleet: FleetScope = False,
    json: Json = False,
) -> int:
    """Wait until GPUs are free, without taking them.

    That they are free now promises nothing: another job may have them a moment later. To get GPUs, use
    `gpu-pool run`, which stands in the queue and holds what it is given.
    Ends with 0 when they are free, with 124 when the time is over.
    """
    try:
        wanted = WantedGpus(gpus, memory, model)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from None
    began = time.monotonic()
    servers = Servers(endpoint, is_fleet=fleet)
    found = servers.run(lambda servers: _wait(servers, wanted, inf if timeout is None else timeout))
    free = () if isinstance(found, TimeOver) else found
    where = free[0].naming.endpoint if free else None
    if json:
        shown = [gpu.naming.as_json(gpu.view) for gpu in free]
        waited_s = round(time.monotonic() - began, 3)
        print_json("wait", {"is_free": bool(free), "endpoint": where, "gpus": shown, "waited_s": waited_s})
    if isinstance(found, TimeOver):
        complain(found.in_words(wanted, timeout or 0.0))
        return TIMED_OUT
    if not json:
        out().print(f"free at {where}: {show_gpus([gpu.id for gpu in free])}", markup=False)
    return 0


async def _wait(servers: Servers, wanted: WantedGpus, timeout_s: float) -> tuple[GpuReport, ...] | TimeOver:
    """Poll every server once a second, until the time is over. Returns the free GPUs, all of one endpoint."""
    clock = asyncio.get_running_loop().time
    began = clock()
    watch, line = _ServerWatch(servers), StatusLine()
    tasks = [asyncio.create_task(watch.poll(id_)) for id_ in servers.ids]
    try:
        while True:
            for report in watch.reports.values():
                if free := wanted.free_in(report):
                    return free
            if watch.has_seen_all:
                _check_can_come(wanted, watch)
            left_s = began + (timeout_s if watch.has_seen_all else max(timeout_s, FIRST_POLL_S)) - clock()
            if left_s <= 0:
                silent = [endpoint for endpoint in servers.ids if endpoint not in watch.reports]
                return TimeOver(list(watch.reports.values()), silent)
            if watch.has_seen_all or (watch.reports and line.is_live):
                standing = (f"{each.endpoint}: {wanted.standing_in(each)}" for each in watch.reports.values())
                line.show(f"waiting for {wanted}: {'; '.join(standing)}")
            await watch.news(left_s)
    finally:
        line.close()
        await cancel_and_wait(*tasks)


class _ServerWatch:
    """What was last seen of each server. Each is polled by itself, so that one that hangs delays no other."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._news = asyncio.Event()
        self.reports: dict[str, PoolReport] = {}
        self.was_any_up = False

    @property
    def has_seen_all(self) -> bool:
        return len(self.reports) == len(self._servers.ids)

    async def poll(self, endpoint: str) -> None:
        while True:
            # The leases and the queue do not matter here, and may be many.
            report = await ask_pool(self._servers, endpoint, "?queue=0&leases=0")
            self.reports[endpoint] = report
            self.was_any_up = self.was_any_up or report.is_up
            self._news.set()
            await asyncio.sleep(POLL_S)

    async def news(self, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):  # wait_for of Python 3.11 may lose a Ctrl-C
                await self._news.wait()
        self._news.clear()


def _check_can_come(wanted: WantedGpus, watch: _ServerWatch) -> None:
    """Raises Failure where waiting makes no sense. A server that answered before and is down may come back."""
    reports = list(watch.reports.values())
    if not watch.was_any_up:
        check_any_is_up(reports)
    if any(not report.is_up or wanted.could_come(report) for report in reports):
        return
    if untold := [report.endpoint for report in reports if wanted.memory_mb and not report.has_leases]:
        raise Failure(
            f"how much memory is left is not known of {', '.join(untold)}, with statistics only; leave --memory out"
        )
    most = [room for report in reports if (room := wanted.most_mb(report)) is not None]
    fits = (
        f"; the most that a GPU has below its threshold is {_at_most(max(most))}" if wanted.memory_mb and most else ""
    )
    raise Failure(f"no server has {wanted}, free or not{fits}; `gpu-pool status` shows what there is")
