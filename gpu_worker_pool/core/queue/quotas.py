"""What an owner may have now, by its quota and the pool's limits."""

from __future__ import annotations

from math import inf

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import FULL_WEIGHT
from gpu_worker_pool.core.model.quota import EVERYBODY_ELSE, NO_QUOTA, Quota
from gpu_worker_pool.core.model.request import Request, Wishes
from gpu_worker_pool.core.model.span import show_span
from gpu_worker_pool.core.model.state import PoolState

from .refusal import was_or_were
from .verdicts import OverCeiling, OverQuota
from .waiting import Line


def quota_of(state: PoolState, owner: str | None) -> Quota:
    if not state.quotas:
        return NO_QUOTA
    return state.quotas.get(owner or "") or state.quotas.get(EVERYBODY_ELSE, NO_QUOTA)


def time_limit_of(state: PoolState, owner: str | None, declared_s: float | None) -> float | None:
    """The time limit of a lease: the declared one, else the pool's default, within the longest that is allowed."""
    limit_s = declared_s or state.settings.default_time_limit_s
    for longest_s in (state.settings.max_time_limit_s, quota_of(state, owner).max_time_limit_s):
        if longest_s is not None and (limit_s is None or longest_s < limit_s):
            limit_s = longest_s
    return limit_s


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
    if quota.ceiling is not None and _least_weight(state, request.wishes) > quota.ceiling * FULL_WEIGHT:
        weight = _least_weight(state, request.wishes) / FULL_WEIGHT
        asked = f"{request.wishes.total_gpus} GPUs were asked for"
        if request.wishes.is_shared:
            asked = f"{request.wishes} {was_or_were(request.wishes)} asked for, which count as {weight:g} GPUs"
        return f"{asked}; the quota of {_name(request)} allows at most {quota.ceiling}"
    if quota.max_priority is not None and request.priority > quota.max_priority:
        return f"priority {request.priority} was asked for; the quota of {_name(request)} allows at most {quota.max_priority}"
    declared_s = request.time_limit_s
    if declared_s is None:
        return None
    limits = [limit for limit in (state.settings.max_time_limit_s, quota.max_time_limit_s) if limit is not None]
    if limits and declared_s > min(limits):
        return f"a time limit of {show_span(declared_s)} was asked for; the longest allowed is {show_span(min(limits))}"
    return None


def _held(state: PoolState, line: Line, *, firm: bool) -> int:
    use = state.owners.get(line.owner)
    return 0 if use is None else use.firm if firm else use.held


def _with_one_more(state: PoolState, line: Line, *, firm: bool) -> int:
    return _held(state, line, firm=firm) + _least_weight(state, line.wishes)


def _least_weight(state: PoolState, wishes: Wishes) -> int:
    """What wishes weigh at least: a share, on the GPUs with the most memory. Where that is not known yet, it needs some
    room.
    """
    memory_mb = state.capacity.largest_mb(wishes.model) if wishes.is_shared else 0.0
    return wishes.total_gpus * (1 if memory_mb is None else weight_of(memory_mb, wishes))


def weight_of(total_mb: float | None, wishes: Wishes) -> int:
    """What a lease weighs on a GPU with so much memory: a share, its part of it."""
    if wishes.memory_mb is None or not total_mb:
        return FULL_WEIGHT
    return max(1, min(FULL_WEIGHT, round(FULL_WEIGHT * wishes.memory_mb / total_mb)))


def too_heavy(state: PoolState, line: Line) -> frozenset[GpuKey]:
    """The GPUs on which a share would weigh more than its owner may still have. Each of several may weigh as much."""
    if not state.quotas or not line.wishes.is_shared:
        return frozenset()
    quota = quota_of(state, line.owner)
    left = inf if quota.ceiling is None else quota.ceiling * FULL_WEIGHT - _held(state, line, firm=False)
    is_lent = line.preemptible or time_limit_of(state, line.owner, line.time_limit_s) is not None
    if quota.gpus is not None and not is_lent:
        left = min(left, quota.gpus * FULL_WEIGHT - _held(state, line, firm=True))
    if left >= line.wishes.total_gpus * FULL_WEIGHT:
        return frozenset()
    most = left / line.wishes.total_gpus
    return frozenset(
        slot.key
        for slot in state.slots_for(line.wishes)
        if slot.reading is not None and weight_of(slot.reading.memory_total_mb, line.wishes) > most
    )


def why_too_heavy(state: PoolState, key: GpuKey, line: Line) -> OverQuota | OverCeiling | None:
    """Why a share may not be on this GPU, and may be on others; None if it may."""
    if key not in too_heavy(state, line):
        return None
    quota = quota_of(state, line.owner)
    if quota.ceiling is not None and quota.ceiling != quota.gpus:
        return OverCeiling(_held(state, line, firm=False) / FULL_WEIGHT, quota.ceiling)
    return OverQuota(_held(state, line, firm=True) / FULL_WEIGHT, quota.gpus or 0)


def _name(request: Request) -> str:
    return request.holder.owner or "an unnamed owner"
