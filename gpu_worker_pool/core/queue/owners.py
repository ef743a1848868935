"""Owners: what each may have by its quota, its groups and the pool's limits, and the order in which their waiters are served.

Requests that are not preemptible come before those that are, a higher priority before a lower one. Then, with fair share,
comes the owner that used least for its weight, and then the request that came first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from gpu_worker_pool.core.model.bounds import show_span
from gpu_worker_pool.core.model.configured import EVERYBODY_ELSE, NO_QUOTA, Group, Quota
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import FULL_WEIGHT, QueuedLease
from gpu_worker_pool.core.model.request import Request, Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.model.waiting import QueueKey, RequestClass

from .refusal import was_or_were
from .verdicts import Verdict, verdict

# (is preemptible, -priority, use by weight, seq, lease id)
Place = tuple[bool, int, float, int, str]


class Order:
    """The order of the waiters at one instant. What owners hold and used stays as it is meanwhile."""

    def __init__(self, state: PoolState, now: float) -> None:
        self._state = state
        self._now = now
        self._use: dict[str | None, float] = {}

    def lease_ids(self, node: str | None = None, newcomer: QueuedLease | None = None) -> list[str]:
        """All waiters, the next one first, and a newcomer in its place; with a node, only those that GPUs of this node may serve."""
        queue = self._state.queue
        keys = queue.keys
        if node is not None:
            keys = [key for key in keys if queue.class_of[key[-1]].wishes.node in {None, node}]
        if self._state.settings.fair_share:
            new = [] if newcomer is None else [self.place_of(newcomer)]
            return [place[-1] for place in sorted([*map(self._place, keys), *new])]
        lease_ids = [queue_key[-1] for queue_key in keys]
        if newcomer is not None:
            lease_ids.insert(bisect_left(keys, (*newcomer.order, newcomer.id)), newcomer.id)
        return lease_ids

    def place_of(self, lease: QueuedLease) -> Place:
        is_preemptible, negative_priority, seq = lease.order
        return (is_preemptible, negative_priority, self._use_of(lease.request.holder.owner), seq, lease.id)

    def position(self, lease: QueuedLease) -> int:
        """The position in the queue; 1 is served next."""
        if not self._state.settings.fair_share:
            return self._state.queue.place_of(lease)
        own = self.place_of(lease)
        return 1 + sum(self._place(queue_key) < own for queue_key in self._state.queue.keys)

    def why_later(self, lease: QueuedLease) -> str | None:
        """Why a waiter that came later, with the same priority, is ahead; None if none is."""
        if not self._state.settings.fair_share:
            return None
        own, owner = self.place_of(lease), lease.request.holder.owner
        for queue_key in self._state.queue.keys:
            place = self._place(queue_key)
            if place[:2] == own[:2] and place < own and place[3] > own[3]:
                other = self._state.queue.class_of[queue_key[-1]].owner
                return (
                    f"{other or 'another owner'} is ahead, having used less lately: {self._share(other)}, "
                    f"{self._share(owner)}"
                )
        return None

    def _place(self, queue_key: QueueKey) -> Place:
        is_preemptible, negative_priority, seq, lease_id = queue_key
        used = self._use_of(self._state.queue.class_of[lease_id].owner)
        return (is_preemptible, negative_priority, used, seq, lease_id)

    def _use_of(self, owner: str | None) -> float:
        """What an owner has used by its weight; nothing where that does not matter."""
        if not self._state.settings.fair_share:
            return 0.0
        if owner not in self._use:
            use = self._state.usage.get(owner)
            used = use.used_at(self._now) if use else 0.0
            self._use[owner] = used / quota_of(self._state, owner).weight
        return self._use[owner]

    def _share(self, owner: str | None) -> str:
        """`ada 12 % of the use with 50 % of the weights`."""
        state = self._state
        used = {each: use.used_at(self._now) for each, use in state.usage.items()}
        weights = {each: quota_of(state, each).weight for each in (*state.usage, *state.queue.owners)}
        all_used, all_weights = sum(used.values()), sum(weights.values())
        part = 100 * used.get(owner, 0.0) / all_used if all_used else 0.0
        of_weights = 100 * weights[owner] / all_weights
        return f"{owner or 'the others'} {part:.0f} % of the use with {of_weights:.0f} % of the weights"


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


def predicted_s(state: PoolState, owner: str | None) -> float | None:
    """How long a lease without a limit will probably last: as the owner's last two leases in the mean, else those of the pool;
    None if nothing is known.
    """
    use = state.usage.get(owner)
    recent = use.recent if use and use.recent else state.last_durations_s
    return max(sum(recent) / len(recent), 1.0) if recent else None


def over_quota(state: PoolState, request_class: RequestClass) -> Verdict | None:
    """Why an owner may have no more leases of this class now; None if it may."""
    left = _left(state, request_class)
    if left is None or least_weight(state, request_class.wishes) <= left:
        return None
    return quota_verdict(state, request_class.owner)


def too_heavy(state: PoolState, request_class: RequestClass) -> frozenset[GpuKey]:
    """The GPUs on which a share would weigh more than its owner may still have. Each of several may weigh as much."""
    wishes, left = request_class.wishes, _left(state, request_class)
    if left is None or not wishes.is_shared or left >= wishes.total_gpus * FULL_WEIGHT:
        return frozenset()
    read = [(slot.key, slot.reading) for slot in state.slots_on(wishes.node) if slot.reading is not None]
    most = left / wishes.total_gpus
    return frozenset(key for key, reading in read if weight_of(reading.memory_total_mb, wishes) > most)


class _Limit(NamedTuple):
    """What an owner, or a group that it is in, has and may have, in thousandths of a GPU. Preemptible leases do not count."""

    left: int
    held: int
    group: str = ""


def _limits(state: PoolState, owner: str | None) -> Iterator[_Limit]:
    own = quota_of(state, owner).gpus
    if own is not None:
        held = _held(state, owner)
        yield _Limit(own * FULL_WEIGHT - held, held)
    for name, group in state.groups.items():
        if group.quota is not None and owner in group.members:
            held = sum(_held(state, member) for member in group.members)
            yield _Limit(group.quota * FULL_WEIGHT - held, held, name)


def _left(state: PoolState, request_class: RequestClass) -> int | None:
    """What an owner may still have, in thousandths of a GPU; None if that is not limited."""
    if request_class.preemptible:
        return None
    return min((limit.left for limit in _limits(state, request_class.owner)), default=None)


def quota_verdict(state: PoolState, owner: str | None) -> Verdict:
    """That the quota of an owner, or of its group, is used up: the one of which least is left."""
    least = min(_limits(state, owner))
    quota, group = (least.left + least.held) // FULL_WEIGHT, {"group": least.group} if least.group else {}
    return verdict("over_quota", held=least.held / FULL_WEIGHT, quota=quota, **group)


def _held(state: PoolState, owner: str | None) -> int:
    use = state.usage.get(owner)
    return 0 if use is None else use.firm


def why_no_group(state: PoolState, name: str, group: Group) -> str | None:
    """Why there cannot be such a group; None if there can."""
    if not group.members:
        return "it has no members; name owners, or Unix groups as @name"
    for key in group.first_right:
        if key not in state.slots:
            return f"no GPU {key.uuid} is known on node {key.node}"
        other = next((other for other, its in state.groups.items() if other != name and key in its.first_right), None)
        if other is not None:
            gpu = state.slots[key].gpu or key.uuid
            return f"group {other} already has first right on {gpu}; take it from one of the two"
    return None


def why_beyond_limits(state: PoolState, request: Request) -> str | None:
    """Why a request asks for more than its owner may ever have; None if it does not."""
    quota = quota_of(state, request.holder.owner)
    owner = request.holder.owner or "an unnamed owner"
    least = least_weight(state, request.wishes)
    limits = [(limit.left + limit.held, limit.group) for limit in _limits(state, request.holder.owner)]
    allowed, group = min(limits, default=(inf, ""))
    if not request.preemptible and least > allowed:
        asked = f"{request.wishes.total_gpus} GPU{'' if request.wishes.total_gpus == 1 else 's'}"
        asked += f" {'was' if request.wishes.total_gpus == 1 else 'were'} asked for"
        if request.wishes.is_shared:
            weight = least / FULL_WEIGHT
            asked = f"{request.wishes} {was_or_were(request.wishes)} asked for, which count as {weight:g} GPUs"
        whose = f"group {group}" if group else owner
        return f"{asked}; the quota of {whose} allows at most {allowed // FULL_WEIGHT:g}"
    if quota.max_priority is not None and request.priority > quota.max_priority:
        return f"priority {request.priority} was asked for; the quota of {owner} allows at most {quota.max_priority}"
    declared_s = request.time_limit_s
    if declared_s is None:
        return None
    longest = [limit for limit in (state.settings.max_time_limit_s, quota.max_time_limit_s) if limit is not None]
    if longest and declared_s > min(longest):
        return (
            f"a time limit of {show_span(declared_s)} was asked for; the longest allowed is {show_span(min(longest))}"
        )
    return None


def least_weight(state: PoolState, wishes: Wishes) -> int:
    """What wishes weigh at least: a share, on the GPUs with the most memory. Where that is not known yet, it needs some
    room.
    """
    memory_mb = state.facts.largest_mb(wishes.model) if wishes.is_shared else 0.0
    return wishes.total_gpus * (1 if memory_mb is None else weight_of(memory_mb, wishes))


def weight_of(total_mb: float | None, wishes: Wishes) -> int:
    """What a lease weighs on a GPU with this much memory: a share, its part of it."""
    if wishes.memory_mb is None or not total_mb:
        return FULL_WEIGHT
    return max(1, min(FULL_WEIGHT, round(FULL_WEIGHT * wishes.memory_mb / total_mb)))
