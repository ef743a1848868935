"""A large pool for the page: of each GPU and lease only what a tile shows, and one GPU in full when the user opens it.

Ten thousand GPUs in full are megabytes a second, of which the user sees some hundred tiles.
"""

from __future__ import annotations

from typing import Any

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, Lease
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.idleness import idle_s
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.calls.gpu_view import gpu_states, gpu_view, slot_order
from gpu_worker_pool.server.calls.lease_view import ends_at, lease_view, warning_view
from gpu_worker_pool.server.calls.pool_view import PoolFrames, encode_pool
from gpu_worker_pool.server.calls.scoped import holders
from gpu_worker_pool.server.http.loop_share import LoopShare
from gpu_worker_pool.server.http.response import encode, fill
from gpu_worker_pool.server.http.scope import Scope
from gpu_worker_pool.wire.page import GpuDetails
from gpu_worker_pool.wire.pool import GpuState

# A pool of more GPUs is sent in brief.
MOST_IN_FULL = 256


async def encode_brief(frames: PoolFrames, scope: Scope, most_queued: int, *, loop_share: LoopShare) -> bytes:
    """Encode what a scope has as `/pool`, without the keys that no tile shows. Keys with their default are left out."""
    frame = await encode_pool(frames, scope, most_queued, 0, loop_share=loop_share, most_gpus=0)
    pool = frames.pool
    state, now = pool.state, pool.now()
    gpus: list[tuple[tuple[str, float, str], bytes]] = []
    for slot, word in gpu_states(pool):
        if scope.node not in {None, slot.key.node}:
            continue
        gpus.append((slot_order(slot), encode(_gpu(state, slot, word))))
        await loop_share.yield_if_due()
    leases: list[bytes] = []
    for lease_id in list(holders(state, scope)):
        lease = state.leases.get(lease_id)
        if isinstance(lease, ActiveLease | EndedLease) and pool.is_written(lease.id):
            leases.append(encode(_lease(state, lease, now)))
            await loop_share.yield_if_due()
    return fill(frame, gpus=[gpu for _, gpu in sorted(gpus)], leases=leases)


def _gpu(state: PoolState, slot: GpuSlot, word: GpuState) -> dict[str, Any]:
    reading = slot.reading
    found = {
        "node": slot.key.node,
        "gpu_id": slot.gpu.index if slot.gpu else None,
        "uuid": slot.key.uuid,
        "name": slot.gpu.name if slot.gpu else None,
        "state": word,
        "leases": tuple(slot.occupants) or None,
        "is_out_of_service": slot.key in state.excluded or None,
        "memory_total_mb": reading.memory_total_mb if reading else None,
        "memory_used_mb": reading.memory_used_mb if reading else None,
        "utilization_percent": reading.utilization_percent if reading else None,
    }
    return _known(found)


def _lease(state: PoolState, lease: Lease, now: float) -> dict[str, Any]:
    holder = lease.request.holder
    found: dict[str, Any] = {
        "id": lease.id,
        "owner": holder.owner,
        "worker_id": holder.worker_id,
        "labels": dict(lease.request.labels) or None,
        "preemptible": lease.request.preemptible or None,
    }
    if isinstance(lease, ActiveLease):
        idle = idle_s(state, lease, now)
        found |= {
            "state": "active",
            "granted_at": iso_time(lease.granted_at),
            "ends_at": ends_at(state, lease),
            "warning": warning_view(state, lease, now),
            "idle_s": None if idle is None else round(idle, 1),
        }
    elif isinstance(lease, EndedLease):
        found |= {"state": "draining", "ended_at": iso_time(lease.ended_at), "end_reason": lease.reason}
    return _known(found)


def _known(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None}


def gpu_details(pool: Pool, node: str, uuid: str) -> GpuDetails | None:
    """One GPU in full, with its leases; None if there is none of this name."""
    state, now = pool.state, pool.now()
    slot = state.slots.get(GpuKey(node, uuid))
    if slot is None:
        return None
    found = [state.leases[lease_id] for lease_id in slot.occupants if lease_id in state.leases]
    return GpuDetails(
        gpu=gpu_view(pool, slot),
        leases=tuple(lease_view(state, lease, now) for lease in found if pool.is_written(lease.id)),
    )
