"""A lease that the database lost is brought back by a box that keeps it."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import (
    FULL_WEIGHT,
    ActiveLease,
    EndedLease,
    EndReason,
    KeptLease,
    Lease,
    QueuedLease,
)
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import has_opening
from gpu_worker_pool.core.queue.owners import time_limit_of, weight_of

from .condense import NO_SEQ
from .decide_nodes import ended_lease


def recover_lease(state: PoolState, command: cmd.RecoverLease, now: float) -> list[ev.Event]:
    """Grant a lease again that the journal does not know, with its old fence. A fence that the journal knows tells that the
    lease has ended since. Each node of a gang brings its own part.
    """
    kept, node = command.kept, command.node
    gpus = tuple(GpuKey(node, uuid) for uuid in kept.gpus)
    known = state.find(kept.id)
    if kept.fence <= state.fences.get(node, 0) or not gpus or not _have_room(state, kept, gpus):
        return []
    if isinstance(known, ActiveLease) and _is_part_of(known, kept, len(gpus)):
        return [ev.LeaseExtended(now, kept.id, gpus, _weight(state, kept, gpus))]
    granted = ev.LeaseGranted(
        now, kept.id, gpus, kept.fence, kept.granted_at, _limit(state, kept, now), _unusual_weight(state, kept, gpus)
    )
    if known is None or _expired_unknown(known, kept):
        return [replace(granted, request=kept.request, seq=NO_SEQ, requested_at=kept.requested_at)]
    if known.request != kept.request:
        return []
    # The grant alone may be lost, and the request be there.
    if isinstance(known, QueuedLease):
        return [granted]
    # It was granted twice, on two boxes. The database lost the later grant, or the client has not heard of the later one.
    is_used = isinstance(known, ActiveLease) and (known.granted_at < kept.granted_at or kept.id in state.untaken)
    return [ev.GrantWithdrawn(now, kept.id), granted] if is_used else []


def end_kept(state: PoolState, command: cmd.EndKept, now: float) -> list[ev.Event]:
    """End the grant that the box means, and no other one of the same request."""
    lease = state.leases.get(command.lease_id)
    if not isinstance(lease, ActiveLease) or lease.fence != command.fence:
        return []
    if command.node not in {key.node for key in lease.gpus}:
        return []
    if command.reason is None:
        return [ev.GrantWithdrawn(now, lease.id)]
    return [ended_lease(state, lease, command.reason, now)]


def _expired_unknown(known: Lease, kept: KeptLease) -> bool:
    """Whether the request left the queue because its client, which has this grant, did not poll any more."""
    if not isinstance(known, EndedLease) or known.reason is not EndReason.EXPIRED:
        return False
    return known.request == kept.request and known.granted_at is None


def _is_part_of(lease: ActiveLease, kept: KeptLease, gpus: int) -> bool:
    """Whether both are of one grant. The same request may have been granted again since, on another node."""
    is_same = (lease.fence, lease.granted_at, lease.request) == (kept.fence, kept.granted_at, kept.request)
    return is_same and len(lease.gpus) + gpus <= lease.request.wishes.total_gpus


def _have_room(state: PoolState, kept: KeptLease, gpus: tuple[GpuKey, ...]) -> bool:
    """Whether no other lease has these GPUs. What drains there has left them, or the box would not have granted again."""
    slots = [slot.without_draining() for key in gpus if (slot := state.slots.get(key)) is not None]
    return all(has_opening(state, slot, kept.request.wishes) for slot in slots)


def _limit(state: PoolState, kept: KeptLease, now: float) -> float | None:
    """When its time limit ends it. The time that it has lasted is known by the time of day only."""
    request = kept.request
    limit_s = time_limit_of(state, request.holder.owner, request.time_limit_s)
    lasted_s = max(now + state.wall_offset_s - kept.granted_at, 0.0)
    return None if limit_s is None else max(now + limit_s - lasted_s, now)


def _weight(state: PoolState, kept: KeptLease, gpus: tuple[GpuKey, ...]) -> int:
    slots = [state.slots.get(key) for key in gpus]
    sizes_mb = [slot.installed.memory_total_mb if slot and slot.installed else None for slot in slots]
    return sum(weight_of(size_mb, kept.request.wishes) for size_mb in sizes_mb)


def _unusual_weight(state: PoolState, kept: KeptLease, gpus: tuple[GpuKey, ...]) -> int | None:
    weight = _weight(state, kept, gpus)
    return None if weight == FULL_WEIGHT * len(gpus) else weight
