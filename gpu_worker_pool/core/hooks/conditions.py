"""What lasts, beside events: leases whose GPUs compute nothing, and nodes of which nothing is known."""

from __future__ import annotations

from gpu_worker_pool.core.model.lease import ActiveLease
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import stale_at
from gpu_worker_pool.core.queue.idleness import idle_s


def idle_leases(state: PoolState, now: float) -> set[str]:
    """The leases whose GPUs compute nothing for as long as the settings say."""
    active = [lease for lease in state.leases.values() if isinstance(lease, ActiveLease)]
    return {lease.id for lease in active if idle_s(state, lease, now) is not None}


def unknown_nodes(state: PoolState, now: float) -> set[str]:
    """The nodes of which no GPU was read lately."""
    known = {
        slot.key.node
        for slot in state.slots.values()
        if slot.reading is not None and now <= stale_at(state, slot.reading)
    }
    return {key.node for key in state.slots} - known
