"""Leases whose GPUs compute nothing. Memory alone is not use."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason
from gpu_worker_pool.core.model.state import PoolState

from .eligibility import stale_at


def idle_s(state: PoolState, lease: ActiveLease, now: float) -> float | None:
    """How long none of its GPUs has computed; None if one did lately, or if that is unknown. What a GPU did since a reading
    that is stale is unknown, also if it is read again now.
    """
    since = -inf
    for slot in map(state.slots.__getitem__, lease.gpus):
        if slot.busy is None or slot.reading is None or now > stale_at(state, slot.reading):
            return None  # one node of a gang may be silent while others are read
        since = max(since, slot.busy)
    return now - since if now - since >= state.settings.idle_after_s else None


def idle_warnings(state: PoolState, readings: Collection[Reading], now: float) -> list[ev.LeaseWarned]:
    """Warn holders that are idle, where the pool takes such GPUs back; withdraw the warning of one that computes."""
    if not state.settings.idle_reclaim:
        return []
    computing: dict[str, bool] = {}
    for reading in readings:
        slot = state.slots.get(reading.gpu.key)
        load_percent = reading.load_percent
        is_busy = load_percent is None or load_percent >= state.settings.computing_percent
        for lease_id in slot.occupants if slot else ():
            computing[lease_id] = computing.get(lease_id, False) or is_busy
    events = []
    for lease_id, is_busy in computing.items():
        lease = state.leases[lease_id]
        if not isinstance(lease, ActiveLease):
            continue
        if lease.ending is None and not is_busy and idle_s(state, lease, now) is not None:
            ends = now + state.settings.preempt_grace_s
            events.append(ev.LeaseWarned(now, lease_id, EndReason.IDLE, min(ends, lease.limit or ends)))
        elif lease.ending is not None and lease.ending.reason is EndReason.IDLE and is_busy:
            events.append(withdrawn(lease, now))
    return events


def withdrawn(lease: ActiveLease, now: float) -> ev.LeaseWarned:
    """Withdraw the warning of a lease. Near its time limit it is warned of that instead."""
    is_near = lease.limit is not None and now >= lease.limit - lease.warning_s
    reason, ends = (EndReason.TIME_LIMIT, lease.end_if_warned(now)) if is_near else (None, now)
    return ev.LeaseWarned(now, lease.id, reason, ends)
