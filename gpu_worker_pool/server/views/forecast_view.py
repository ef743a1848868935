"""What may be expected: when a request that is made now would start, and until when leases last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import cast

from gpu_worker_pool.core.decider.forecast import Forecast, Forecasts, When, usual_wishes
from gpu_worker_pool.core.model.lease import ActiveLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.queue.planner import Planner
from gpu_worker_pool.core.queue.withheld import Withheld
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.wire.leases import DateBasis
from gpu_worker_pool.wire.page import ExpectedEnd
from gpu_worker_pool.wire.plans import ForecastStart, ForecastView, ModelForecast

from .pool_view import gpu_states
from .target import Target


async def forecast_view(
    pool: Pool, target: Target, *, gpus: int | None = None, model: str | None = None, owner: str | None = None
) -> ForecastView:
    """What a request of this owner may expect; of the usual sizes and all models unless some are given. It yields to other work
    in between.
    """
    await pool.caught_up()
    found: list[Forecast] = []
    if pool.trouble is None:
        sizes = {} if gpus is None else {"sizes": (gpus,)}
        usual = usual_wishes(pool.state, **sizes) if model is None else _sized(model, usual_wishes(pool.state, **sizes))
        forecasts, share = Forecasts(pool.state, pool.now(), [_on(target, each) for each in usual], owner), LoopShare()
        for _ in forecasts.steps():
            await share.yield_if_due()
        found = forecasts.found
    counts = _counts(pool, target)
    # A pool of one model has forecasts for any model only.
    by_model = {
        name: [each for each in found if each.wishes.model == (name if len(counts) > 1 else None)] for name in counts
    }
    is_one = gpus is not None or model is not None
    now = iso_time(pool.wall_now()) if pool.is_open else None
    return ForecastView(
        node=target.name(pool.node),
        now=now,
        can_grant=pool.trouble is None,
        starts=_starts(pool, [each for each in found if each.wishes.model == model], now, is_one=is_one),
        models=()
        if is_one
        else tuple(
            ModelForecast(model=name, gpus=total, free=free, starts=_starts(pool, by_model[name], now, is_one=False))
            for name, (total, free) in counts.items()
        ),
    )


def _sized(model: str, usual: Sequence[Wishes]) -> list[Wishes]:
    return [replace(each, model=model) for each in usual if each.model is None]


def _on(target: Target, wishes: Wishes) -> Wishes:
    return wishes if target.node is None else replace(wishes, node=target.node)


def _counts(pool: Pool, target: Target) -> dict[str | None, tuple[int, int]]:
    """How many GPUs there are of each model, and how many of them are free; most GPUs first."""
    total: Counter[str | None] = Counter()
    free: Counter[str | None] = Counter()
    for slot, state in gpu_states(pool):
        if target.node in {None, slot.key.node}:
            name = slot.gpu.name if slot.gpu else None
            total[name] += 1
            free[name] += state == "free"
    return {name: (number, free[name]) for name, number in total.most_common()}


def _starts(pool: Pool, found: Sequence[Forecast], now: str | None, *, is_one: bool) -> tuple[ForecastStart, ...]:
    """The starts; what would be refused is left out, unless it was asked for."""
    return tuple(_start(pool, each, now) for each in found if is_one or each.when is not When.NEVER)


def _start(pool: Pool, found: Forecast, now: str | None) -> ForecastStart:
    start = partial(ForecastStart, gpus=found.wishes.gpus, why=found.why)
    if found.when is When.NOW:
        return start(at=now, basis="declared")
    if found.start is None:
        return start(at=None, basis="unknown")
    at = iso_time(found.start.at + pool.state.wall_offset_s)
    return start(at=at, basis=cast("DateBasis", str(found.start.basis)))


def predicted_ends(pool: Pool, target: Target) -> tuple[ExpectedEnd, ...]:
    """Until when the leases without a time limit will probably last; those that nothing tells of are left out."""
    state, now = pool.state, pool.now()
    planner = Planner(state, now, Withheld(state, now))
    found = []
    for lease_id in target.holders(state):
        lease = state.leases[lease_id]
        if isinstance(lease, ActiveLease) and lease.ends is None and (end := planner.end_of(lease_id).at) < inf:
            found.append(ExpectedEnd(lease_id=lease_id, at=iso_time(end + state.wall_offset_s)))
    return tuple(found)
