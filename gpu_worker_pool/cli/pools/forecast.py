"""What a request that is made now may expect: the first question of a user who looks at a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.cli.units import count, show_moment
from gpu_worker_pool.wire.plans import ForecastView
from gpu_worker_pool.wire.reader import read, read_time

from .report import PoolReport
from .servers import Servers


async def forecast_line(servers: Servers, reports: Sequence[PoolReport], now: float) -> str | None:
    """`3 GPUs are free now`, or `If you ask now: 1 GPU about 01:42, 4 about 03:10`. None where no server grants anything."""
    able = [report for report in reports if report.is_up and report.has_leases and report.same_as is None]
    able = [report for report in able if report.view.can_grant is not False and report.view.gpus]
    free = {report.endpoint: sum(gpu.state == "free" for gpu in report.view.gpus) for report in able}
    if total := sum(free.values()):
        where = ", ".join(f"{number} at {endpoint}" for endpoint, number in free.items() if number)
        return f"{count(total, 'GPU')} {'is' if total == 1 else 'are'} free now" + (
            f" ({where})" if len(reports) > 1 else ""
        )
    answers = await asyncio.gather(*(servers.ask(report.endpoint, "/forecast") for report in able))
    views = [read(ForecastView, answer.data, clean=plain) for answer in answers if answer.is_ok]
    return forecast_text([view for view in views if view is not None], now)


def forecast_text(views: Sequence[ForecastView], now: float) -> str | None:
    """The forecast of several pools: for each number of GPUs the earliest start."""
    starts = [start for view in views for start in view.starts]
    earliest: dict[int, float] = {}
    for start in starts:
        if (at := read_time(start.at)) is not None:
            earliest[start.gpus] = min(at, earliest.get(start.gpus, at))
    if not earliest:
        why = next((start.why for start in starts if start.why), "the leases before you have no known end")
        return f"If you ask now, you will wait: {why}" if starts else None
    said: list[str] = []
    for when, sizes in groupby(sorted(earliest), lambda size: _when(earliest[size], now)):
        same = list(sizes)
        number = str(same[0]) if len(same) == 1 else f"{same[0]} to {same[-1]}"
        noun = "" if said else count(same[-1], "GPU").partition(" ")[2] + " "
        said.append(f"{number} {noun}{when}")
    return f"If you ask now: {', '.join(said)}"


def _when(at: float, now: float) -> str:
    return "at once" if at <= now else f"about {show_moment(at, now)}"
