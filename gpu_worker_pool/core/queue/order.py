"""The order in which waiters are served.

Requests that are not preemptible come before those that are, owners within their quota before those that borrow, a
higher priority before a lower one. Then, with fair share, comes the owner that used least for its weight, and then the
request that came first.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import merge

from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.state import PoolState

from .quotas import borrows, quota_of
from .waiting import Line, QueueKey

# (is preemptible, borrows, -priority, use by weight, seq, lease id)
Place = tuple[bool, bool, int, float, int, str]


class Order:
    """The order at one instant. What owners hold and used stays as it is meanwhile."""

    def __init__(self, state: PoolState, now: float) -> None:
        self._state = state
        self._now = now
        self._use: dict[str | None, float] = {}

    def place(self, line: Line, queue_key: QueueKey) -> Place:
        preemptible, negative_priority, seq, lease_id = queue_key
        if not self._state.queue.splits_owners:
            return (preemptible, False, negative_priority, 0.0, seq, lease_id)
        return (preemptible, borrows(self._state, line), negative_priority, self._use_of(line.owner), seq, lease_id)

    def place_of(self, lease: QueuedLease) -> Place:
        return self.place(self._state.queue.line_of(lease), (*lease.order, lease.id))

    def position(self, lease: QueuedLease) -> int:
        """The position in the queue, or among the waiters inside the same lease; 1 is served next."""
        queue = self._state.queue
        if lease.request.parent is not None:
            return self._state.inside.position(lease)
        if not queue.splits_owners:
            return queue.place_of(lease)
        own = self.place_of(lease)
        return 1 + sum(
            bisect_left(keys, own, key=lambda queue_key, line=line: self.place(line, queue_key))  # type: ignore[misc]
            for line, keys in queue.lines.items()
        )

    def lease_ids(self, node: str | None = None) -> list[str]:
        """All waiters, the next one first; with a node, only those that GPUs of this node may serve."""
        queue = self._state.queue
        if not queue.splits_owners and node is None:
            return list(queue)
        wanted = (
            (line, keys) for line, keys in queue.lines.items() if node is None or line.wishes.node in {None, node}
        )
        lines = ([self.place(line, queue_key) for queue_key in keys] for line, keys in wanted)
        return [place[-1] for place in merge(*lines)]

    def _use_of(self, owner: str | None) -> float:
        if not self._state.settings.fair_share:
            return 0.0
        if owner not in self._use:
            use = self._state.owners.get(owner)
            used = use.used_at(self._now) if use else 0.0
            self._use[owner] = used / quota_of(self._state, owner).weight
        return self._use[owner]


def why_later(state: PoolState, lease: QueuedLease, now: float) -> str | None:
    """Why a waiter that came later, with the same priority, is ahead; None if none is."""
    order = Order(state, now)
    own = order.place_of(lease)
    owner = lease.request.holder.owner
    for line, keys in state.queue.lines.items():
        for queue_key in keys[:1]:
            place = order.place(line, queue_key)
            if line.owner == owner or place > own or place[4] < own[4] or (place[0], place[2]) != (own[0], own[2]):
                continue
            other = line.owner or "another owner"
            if place[1] != own[1]:
                return f"{other} is ahead, within its quota; this request is above the quota of {owner or 'its owner'}"
            return f"{other} is ahead, having used less lately: {_share(state, line.owner, now)}, {_share(state, owner, now)}"
    return None


def _share(state: PoolState, owner: str | None, now: float) -> str:
    """`ada 12 % of the use, with 50 % of the weights`."""
    owners = {*state.owners, *state.queue.owners}
    used = {each: use.used_at(now) for each, use in state.owners.items()}
    weights = {each: quota_of(state, each).weight for each in owners}
    all_used, all_weights = sum(used.values()), sum(weights.values())
    part = 100 * used.get(owner, 0.0) / all_used if all_used else 0.0
    return f"{owner or 'the others'} {part:.0f} % of the use with {100 * weights[owner] / all_weights:.0f} % of the weights"
