"""Leases whose GPUs compute nothing. Memory alone is not use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason
from gpu_worker_pool.core.model.state import PoolState

from .eligibility import stale_at


def idle_s(
    state: PoolState, lease: ActiveLease, now: float, being_read: Mapping[GpuKey, float] | None = None
) -> float | None:
    """How long none of its GPUs has computed; None if one did lately, or if that is unknown: what a GPU did while it was not
    read, and a silent node of a gang. `being_read` are GPUs with new readings, and when these began.
    """
    since = -inf
    for slot in map(state.slots.__getitem__, lease.gpus):
        if slot.reading is None or slot.busy is None:
            return None
        began = now if being_read is None else being_read.get(slot.key, now)
        # A new reading that took long to arrive says nothing of the time since it began.
        if began > stale_at(state, slot.reading) or now > began + state.settings.stale_after_s:
            return None
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
    being_read = {reading.gpu.key: reading.at for reading in readings}
    events = []
    for lease_id, is_busy in computing.items():
        lease = state.leases[lease_id]
        if not isinstance(lease, ActiveLease):
            continue
        if lease.ending is None and not is_busy and idle_s(state, lease, now, being_read) is not None:
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
