"""A lease as everybody reads it."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease, EndedLease, Lease, QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import Obstacle, Verdict, judge
from gpu_worker_pool.core.queue.explain import Explainer, Explanation, explain

MIG_PREFIX = "MIG-"
MOST_EXPLAINED = 100


def brief_view(state: PoolState, lease: Lease, now: float, explainer: Explainer) -> dict[str, Any]:
    """The lease as one of many: what stands between a waiting one and each GPU is left out, and far back in the line
    also why.
    """
    if not isinstance(lease, QueuedLease):
        return lease_view(state, lease, now)
    position = state.queue.position(lease)
    if position <= MOST_EXPLAINED:
        reason = explainer.reason(lease)
    else:
        reason = f"Position {position} of {len(state.queue)}, waiting for {lease.request.wishes}"
    return {
        **_common(lease, "queued", reason=reason, requested_at=lease.requested_at),
        "position": position,
        "expires_in_s": _left_s(state, lease.id, now),
    }


def lease_view(state: PoolState, lease: Lease, now: float, *, by_uuid: bool = False) -> dict[str, Any]:
    """The lease in JSON's terms. `by_uuid`: name the GPUs by UUID in `env` instead of by index."""
    match lease:
        case QueuedLease():
            explanation = explain(state, lease.id, now)
            return {
                **_common(lease, "queued", reason=str(explanation), requested_at=lease.requested_at),
                "position": explanation.position if explanation else None,
                "expires_in_s": _left_s(state, lease.id, now),
                "obstacles": _obstacles(explanation),
            }
        case ActiveLease():
            return {
                **_common(lease, "active", reason=None, requested_at=lease.requested_at),
                "gpus": [gpu_view(state, key) for key in lease.gpus],
                "fence": lease.fence,
                "granted_at": iso_time(lease.granted_at),
                "expires_in_s": _left_s(state, lease.id, now),
                "env": _env(state, lease.gpus, by_uuid=by_uuid),
            }
        case DrainingLease():
            return {
                **ended_view(state, lease.ended),
                "state": "draining",
                "reason": _why_draining(state, lease, now),
                "draining_gpus": [gpu_view(state, key) for key in lease.gpus],
            }
        case EndedLease():
            return ended_view(state, lease)


def ended_view(state: PoolState, lease: EndedLease) -> dict[str, Any]:
    """The lease as it ended, whatever its processes still do."""
    return {
        **_common(lease, "ended", reason=str(lease.reason), requested_at=lease.requested_at),
        "gpus": [gpu_view(state, key) for key in lease.gpus],
        "fence": lease.fence,
        "granted_at": iso_time(lease.granted_at),
        "ended_at": iso_time(lease.ended_at),
        "end_reason": str(lease.reason),
    }


def iso_time(wall_s: float | None) -> str | None:
    """Wall-clock seconds as people and programs read them, in UTC."""
    if wall_s is None:
        return None
    try:
        return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return None  # the wall clock was far off when this was written; nothing depends on it


def gpu_view(state: PoolState, key: GpuKey) -> dict[str, Any]:
    """Which GPU, as a lease names it."""
    slot = state.slots.get(key)
    gpu = slot.reading.gpu if slot and slot.reading else None
    # Until it has been looked at after a restart, all that is known of a GPU is its key.
    return {
        "node": key.node,
        "gpu_id": gpu.index if gpu else None,
        "uuid": key.uuid,
        "name": gpu.name if gpu else None,
    }


def verdict_view(verdict: Verdict) -> dict[str, Any]:
    """A verdict as data and in words."""
    data = {item.name: getattr(verdict, item.name) for item in fields(verdict)}
    return {"code": verdict.code, "text": str(verdict), **data}


def _common(lease: Lease, state: str, *, reason: str | None, requested_at: float) -> dict[str, Any]:
    request, holder = lease.request, lease.request.holder
    return {
        "id": lease.id,
        "state": state,
        "reason": reason,
        "position": None,
        "gpus": [],
        "fence": None,
        "owner": holder.owner,
        "worker_id": holder.worker_id,
        "host": holder.host,
        "pid": holder.pid,
        "priority": request.priority,
        "memory_mb": request.wishes.memory_mb,
        "requested_at": iso_time(requested_at),
        "granted_at": None,
        "ttl_s": request.ttl_s,
        "expires_in_s": None,
        "env": {},
        "wishes": _wishes(request.wishes),
        "labels": dict(request.labels),
        "is_local": holder.is_local,
        "ended_at": None,
        "end_reason": None,
    }


def _wishes(wishes: Wishes) -> dict[str, Any]:
    return {item.name: getattr(wishes, item.name) for item in fields(wishes)}


def _env(state: PoolState, keys: tuple[GpuKey, ...], *, by_uuid: bool) -> dict[str, str]:
    """What to put into the environment of a process that is to see these GPUs and no others."""
    gpus = [gpu_view(state, key) for key in keys]
    by_uuid = by_uuid or any(gpu["gpu_id"] is None or gpu["uuid"].startswith(MIG_PREFIX) for gpu in gpus)
    devices = [
        gpu["uuid"] if by_uuid else str(gpu["gpu_id"]) for gpu in sorted(gpus, key=lambda gpu: gpu["gpu_id"] or 0)
    ]
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(devices)}


def _left_s(state: PoolState, lease_id: str, now: float) -> float:
    return round(max(state.agenda.due_at(lease_id) - now, 0.0), 3)


def _obstacles(explanation: Explanation | None) -> list[dict[str, Any]]:
    return [
        {
            "node": item.key.node,
            "gpu_id": item.gpu.index if item.gpu else None,
            "uuid": item.key.uuid,
            **verdict_view(item.verdict),
        }
        for item in (explanation.verdicts if explanation else ())
    ]


def _why_draining(state: PoolState, lease: DrainingLease, now: float) -> str:
    verdicts: list[Obstacle | Verdict] = [
        judge(state, state.slots[key], lease.request.wishes, now) for key in lease.gpus
    ]
    return "; ".join(dict.fromkeys(str(verdict) for verdict in verdicts))
