"""What an owner may have now, by its quota and the pool's limits."""

from __future__ import annotations

from gpu_worker_pool.core.model.lease import FULL_WEIGHT
from gpu_worker_pool.core.model.quota import EVERYBODY_ELSE, NO_QUOTA, Quota
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.span import show_span
from gpu_worker_pool.core.model.state import PoolState

from .eligibility import OverCeiling, OverQuota
from .waiting import Line


def quota_of(state: PoolState, owner: str | None) -> Quota:
    if not state.quotas:
        return NO_QUOTA
    return state.quotas.get(owner or "") or state.quotas.get(EVERYBODY_ELSE, NO_QUOTA)


def time_limit_of(state: PoolState, owner: str | None, declared_s: float | None) -> float | None:
    """The time limit of a lease: the declared one, else the pool's default, within the longest that is allowed."""
    limits = [
        limit
        for limit in (
            declared_s or state.settings.default_time_limit_s,
            state.settings.max_time_limit_s,
            quota_of(state, owner).max_time_limit_s,
        )
        if limit is not None
    ]
    return min(limits, default=None)


def borrows(state: PoolState, line: Line) -> bool:
    """Whether an owner would have more than its quota with one more such lease."""
    limit = quota_of(state, line.owner).gpus
    return limit is not None and not line.preemptible and _with_one_more(state, line, firm=True) > limit * FULL_WEIGHT


def obstacle(state: PoolState, line: Line) -> OverQuota | OverCeiling | None:
    """Why an owner may have no more of such leases now; None if it may."""
    if not state.quotas:
        return None
    quota = quota_of(state, line.owner)
    if quota.ceiling is not None and _with_one_more(state, line, firm=False) > quota.ceiling * FULL_WEIGHT:
        return OverCeiling(_held(state, line, firm=False) / FULL_WEIGHT, quota.ceiling)
    if line.preemptible or not borrows(state, line):
        return None
    if time_limit_of(state, line.owner, line.time_limit_s) is not None:
        return None
    return OverQuota(_held(state, line, firm=True) / FULL_WEIGHT, quota.gpus or 0)


def why_beyond_limits(state: PoolState, request: Request) -> str | None:
    """Why a request asks for more than its owner may ever have; None if it does not."""
    quota = quota_of(state, request.holder.owner)
    gpus, declared_s = request.wishes.total_gpus, request.time_limit_s
    if quota.ceiling is not None and gpus > quota.ceiling and not request.wishes.is_shared:
        return f"{gpus} GPUs were asked for; the quota of {_name(request)} allows at most {quota.ceiling}"
    if quota.max_priority is not None and request.priority > quota.max_priority:
        return f"priority {request.priority} was asked for; the quota of {_name(request)} allows at most {quota.max_priority}"
    limits = [limit for limit in (state.settings.max_time_limit_s, quota.max_time_limit_s) if limit is not None]
    if declared_s is not None and limits and declared_s > min(limits):
        return f"a time limit of {show_span(declared_s)} was asked for; the longest allowed is {show_span(min(limits))}"
    return None


def _held(state: PoolState, line: Line, *, firm: bool) -> int:
    use = state.owners.get(line.owner)
    return 0 if use is None else use.firm if firm else use.held


def _with_one_more(state: PoolState, line: Line, *, firm: bool) -> int:
    # What a share weighs depends on its GPU. It needs some room at least.
    weight = line.wishes.total_gpus * (1 if line.wishes.is_shared else FULL_WEIGHT)
    return _held(state, line, firm=firm) + weight


def _name(request: Request) -> str:
    return request.holder.owner or "an unnamed owner"
