"""Views of a lease."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason, Lease, QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import judge
from gpu_worker_pool.core.queue.explain import Explainer, Explanation, explain, free_elsewhere
from gpu_worker_pool.core.queue.idleness import idle_s
from gpu_worker_pool.core.queue.planner import FreeAt
from gpu_worker_pool.core.queue.verdicts import Verdict
from gpu_worker_pool.gpus.grant_env import GrantedGpu, grant_env
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.encoding import shared_fields
from gpu_worker_pool.server.views.target import ShownPool
from gpu_worker_pool.wire import leases as wire
from gpu_worker_pool.wire.leases import after_warning

MOST_EXPLAINED = 100

ViewT = TypeVar("ViewT", bound=wire.LeaseView)


async def listed_leases(
    pool: ShownPool, lease_ids: Iterable[str], share: LoopShare
) -> AsyncIterator[tuple[Lease, wire.LeaseView]]:
    """These leases as lists show them; those that are not written are left out. It yields to other work in between."""
    lease_ids = list(lease_ids)
    starts = await pool.expected_starts(share)
    explainer = Explainer(pool.state, pool.now())
    for lease_id in lease_ids:
        await share.yield_if_due()
        lease = pool.state.leases.get(lease_id)
        if lease is None or not pool.is_written(lease_id):
            continue
        state, now = pool.state, pool.now()
        yield (
            lease,
            (
                _listed_waiter(state, lease, now, explainer, starts)
                if isinstance(lease, QueuedLease)
                else lease_view(state, lease, now)
            ),
        )


def _listed_waiter(
    state: PoolState, lease: QueuedLease, now: float, explainer: Explainer, starts: Mapping[str, FreeAt]
) -> wire.LeaseView:
    """A waiter in a list: without its obstacles. Far back in the queue the reason is short."""
    position = explainer.position(lease)
    if explainer.can_afford(lease) and position <= MOST_EXPLAINED:
        reason = str(explainer.explain(lease))
    else:
        reason = f"Position {position} of {len(state.queue)}, waiting for {lease.request.wishes}"
    return _view(
        wire.LeaseView,
        lease,
        "queued",
        reason=reason,
        position=position,
        expires_in_s=left_s(state, lease.id, now),
        **_expected(state, starts.get(lease.id)),
    )


def _active_view(
    state: PoolState, lease: ActiveLease, now: float, *, by_uuid: bool, pool_id: str | None, asked: str | None
) -> wire.LeaseView:
    gpus, idle = gpu_refs(state, lease.gpus), idle_s(state, lease, now)
    kind: Callable[..., wire.LeaseView] = (
        wire.LeaseView if pool_id is None else partial(wire.ActiveLeaseView, pool_id=pool_id)
    )
    if len({gpu.node for gpu in gpus}) == 1:
        env: Mapping[str, str] = env_of(gpus, by_uuid=by_uuid)
    else:
        parts = _parts(gpus, by_uuid=by_uuid)
        kind = partial(wire.GangLeaseView, pool_id=pool_id, nodes=parts)
        env = next((part.env for part in parts if part.node == asked), parts[0].env)
    return _view(
        kind,
        lease,
        "active",
        gpus=gpus,
        fence=lease.fence,
        granted_at=iso_time(lease.granted_at),
        env=env,
        expires_in_s=left_s(state, lease.id, now),
        ends_at=ends_at(state, lease),
        warning=warning_view(state, lease, now),
        idle_s=None if idle is None else round(idle, 1),
    )


def lease_view(
    state: PoolState,
    lease: Lease,
    now: float,
    *,
    by_uuid: bool = False,
    pool_id: str | None = None,
    starts: Mapping[str, FreeAt] = MappingProxyType({}),
    asked: str | None = None,
) -> wire.LeaseView:
    """The lease alone, in full. With `by_uuid`, `env` names the GPUs by UUID instead of by index. An active lease names the
    pool that granted it, if `pool_id` is given. `starts` are the expected starts of waiters.
    """
    match lease:
        case QueuedLease():
            explanation = explain(state, lease.id, now)
            return _view(
                wire.WaitingLeaseView,
                lease,
                "queued",
                reason=f"{explanation}{_elsewhere(state, lease, now)}",
                position=explanation.position if explanation else None,
                expires_in_s=left_s(state, lease.id, now),
                obstacles=_obstacles(explanation),
                **_expected(state, starts.get(lease.id)),
            )
        case ActiveLease():
            return _active_view(state, lease, now, by_uuid=by_uuid, pool_id=pool_id, asked=asked)
        case EndedLease() if lease.draining:
            why = dict.fromkeys(
                str(judge(state, state.slots[key], lease.request.wishes, now)) for key in lease.draining
            )
            still = gpu_refs(state, lease.draining)
            return _ended(wire.DrainingLeaseView, state, lease, "draining", "; ".join(why), draining_gpus=still)
        case EndedLease():
            return _ended(wire.EndedLeaseView, state, lease, "ended", str(lease.reason))


def set_aside_view(state: PoolState, lease: ActiveLease, now: float) -> wire.LeaseView:
    """A lease whose client has not taken its grant up, as its client sees it: it waits, and none is ahead of it."""
    within_s = left_s(state, lease.id, now) or 0.0
    return _view(
        wire.WaitingLeaseView,
        lease,
        "queued",
        reason=f"GPUs are set aside for it; ask again within {within_s:.1f} s to take them up",
        position=0,
        expires_in_s=within_s,
        **_expected(state, None),
    )


def _elsewhere(state: PoolState, lease: QueuedLease, now: float) -> str:
    """Where in the fleet GPUs are free while a request waits for those of its own box."""
    free = free_elsewhere(state, lease.request.wishes, now)
    return f"; free on other boxes: {', '.join(f'{number} on {node}' for node, number in free.items())}" if free else ""


def outcome_view(pool: Pool, lease: Lease) -> wire.LeaseView:
    """The lease after its release or revocation: ended, whether or not its processes still run."""
    return lease_view(pool.state, lease.record if isinstance(lease, EndedLease) else lease, pool.now())


def gpu_ref(state: PoolState, key: GpuKey) -> wire.GpuRef:
    """A GPU as a lease names it: by its last reading, else by the inventory of its box."""
    slot = state.slots.get(key)
    gpu = slot.gpu if slot else None
    return wire.GpuRef(node=key.node, gpu_id=gpu.index if gpu else None, uuid=key.uuid, name=gpu.name if gpu else None)


def verdict_view(verdict: Verdict, **where: Any) -> wire.VerdictView:
    """A verdict as data and as a sentence. The type has the keys of all verdicts; each is sent with its own only."""
    return cast("wire.VerdictView", {**where, "code": verdict.code, "text": str(verdict), **verdict.facts})


def _view(kind: Callable[..., ViewT], lease: Lease, state: wire.LeaseState, **own: Any) -> ViewT:
    request, wishes = lease.request, lease.request.wishes
    shown = {
        **shared_fields(wire.LeaseView, request.holder),
        **shared_fields(wire.LeaseView, request),
        "memory_mb": wishes.memory_mb,
        "wishes": _wishes_view(wishes),
        "labels": dict(request.labels),
        "is_local": _is_watched(lease),
        "requested_at": iso_time(lease.requested_at),
    }
    return kind(id=lease.id, state=state, **shown, **own)


def _ended(
    kind: type[ViewT], state: PoolState, lease: EndedLease, word: wire.LeaseState, reason: str, **own: Any
) -> ViewT:
    return _view(
        kind,
        lease,
        word,
        reason=reason,
        gpus=gpu_refs(state, lease.gpus),
        fence=lease.fence,
        granted_at=iso_time(lease.granted_at),
        ended_at=iso_time(lease.ended_at),
        **ending_of(lease),
        **own,
    )


def ending_of(lease: EndedLease) -> dict[str, Any]:
    """How a lease ended. The note has the words of the one that ended it, else what its holder had been told."""
    return {
        "end_reason": lease.reason,
        "ended_by": lease.by,
        "end_note": lease.why or (None if lease.warned is None else after_warning(lease.warned)),
        "peak_memory_mb": lease.peak_memory_mb,
        "mean_utilization_percent": lease.mean_utilization_percent,
    }


def _wishes_view(wishes: Wishes) -> wire.WishesView:
    """Only requests to a fleet say which nodes they are for, and only those that choose GPUs how."""
    kind = wire.WishesView if wishes.nodes == 1 and wishes.node is None else wire.FleetWishesView
    if wishes.min_memory_mb is not None or wishes.exclude is not None:
        kind = wire.ChosenWishesView
    return kind(**shared_fields(kind, wishes))


def _parts(gpus: tuple[wire.GpuRef, ...], *, by_uuid: bool) -> tuple[wire.NodePart, ...]:
    """The GPUs of each node, in the order of the lease, with the environment of processes there."""
    nodes = dict.fromkeys(gpu.node for gpu in gpus)
    on_nodes = ((node or "", tuple(gpu for gpu in gpus if gpu.node == node)) for node in nodes)
    return tuple(wire.NodePart(node=node, gpus=own, env=env_of(own, by_uuid=by_uuid)) for node, own in on_nodes)


def gpu_refs(state: PoolState, keys: tuple[GpuKey, ...]) -> tuple[wire.GpuRef, ...]:
    return tuple(gpu_ref(state, key) for key in keys)


def env_of(gpus: tuple[wire.GpuRef, ...], *, by_uuid: bool) -> dict[str, str]:
    """The environment of a process that must see these GPUs and no others."""
    return grant_env([GrantedGpu(gpu.gpu_id, gpu.uuid) for gpu in gpus], by_uuid=by_uuid)


def warning_view(state: PoolState, lease: Lease, now: float) -> wire.EndWarning | None:
    """The warning of a lease that is about to be ended."""
    ending = lease.ending if isinstance(lease, ActiveLease) else None
    if ending is None:
        return None
    ends_at = iso_time(ending.at + state.wall_offset_s) or ""
    return wire.EndWarning(reason=ending.reason, ends_at=ends_at, ends_in_s=round(max(ending.at - now, 0.0), 3))


def ends_at(state: PoolState, lease: ActiveLease) -> str | None:
    """When its time limit ends it. A late warning leaves its holder some more time."""
    is_limited = lease.ending is not None and lease.ending.reason is EndReason.TIME_LIMIT
    limit = lease.ending.at if lease.ending is not None and is_limited else lease.limit
    return None if limit is None else iso_time(limit + state.wall_offset_s)


def _expected(state: PoolState, start: FreeAt | None) -> dict[str, Any]:
    if start is None:
        return {"expected_start_at": None, "expected_start_basis": "unknown", "expected_after": None}
    after = state.find(start.after) if start.after else None
    # A lease that the pool has announced to end does not depend on its holder any more.
    is_sure = getattr(after, "ending", None) is not None
    return {
        "expected_start_at": iso_time(start.at + state.wall_offset_s),
        "expected_start_basis": str(start.basis),
        "expected_after": after.request.who if after and not is_sure else None,
    }


def _is_watched(lease: Lease) -> bool:
    """Whether the lease lasts as long as its holder's process. On another box of the fleet than the process, it does not."""
    return lease.ttl_s is None if isinstance(lease, ActiveLease) else lease.request.holder.is_local


def left_s(state: PoolState, lease_id: str, now: float) -> float | None:
    """How long until the lease expires without a heartbeat; None if it does not. In a fleet the box of an active lease counts
    its heartbeats: then this is how long at least, and 0 where only that box knows. It is never None there: to a client, None
    means that no heartbeat is needed.
    """
    due_at = state.expires_at(lease_id)
    return None if due_at is None else round(max(due_at - now, 0.0), 3)


def _obstacles(explanation: Explanation | None) -> tuple[wire.ObstacleView, ...]:
    found = [
        verdict_view(item.verdict, node=item.key.node, gpu_id=item.gpu.index if item.gpu else None, uuid=item.key.uuid)
        for item in (explanation.verdicts if explanation else ())
    ]
    return cast("tuple[wire.ObstacleView, ...]", tuple(found))
