"""The last events of the pool, for the page."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import Lease, QueuedLease
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.views.lease_view import gpu_ref
from gpu_worker_pool.server.views.target import EVERYTHING, Target
from gpu_worker_pool.wire.page import RecentEvent, RecentKind

KEPT = 50
LABEL = "command"

_KINDS: dict[type[ev.Event], RecentKind] = {
    ev.LeaseQueued: "queued",
    ev.LeaseGranted: "granted",
    ev.GrantWithdrawn: "queued",
    ev.LeaseWarned: "warned",
    ev.LeaseEnded: "ended",
    ev.GpuDrained: "drained",
}


class RecentEvents:
    """Keeps the last `KEPT` events. An event is kept as it is, which is cheap; its view is made when it is asked for."""

    def __init__(self, state: Callable[[], PoolState]) -> None:
        self._state = state
        # Each with its lease at that time; None if it has no lease, or the lease is no longer known.
        self._kept: deque[tuple[ev.Event, Lease | None]] = deque(maxlen=KEPT)

    def follow(self, events: Sequence[ev.Event]) -> None:
        find = self._state().find
        for event in events:
            if _kind(event) is not None:
                lease_id = getattr(event, "lease_id", None)
                self._kept.append((event, None if lease_id is None else find(lease_id)))

    def views(self, scope: Target = EVERYTHING) -> tuple[RecentEvent, ...]:
        """The views of those within a scope, latest first."""
        return tuple(
            self._view(event, lease) for event, lease in reversed(self._kept) if _is_within(event, lease, scope)
        )

    def _view(self, event: ev.Event, lease: Lease | None) -> RecentEvent:
        state = self._state()
        request = getattr(event, "request", None) or (lease.request if lease else None)
        return RecentEvent(
            at=iso_time(event.at + state.wall_offset_s),
            kind=cast("RecentKind", _kind(event)),
            lease_id=getattr(event, "lease_id", None),
            owner=request.holder.owner if request else None,
            worker_id=request.holder.worker_id if request else None,
            label=dict(request.labels).get(LABEL) if request else None,
            gpus=tuple(gpu_ref(state, key) for key in _gpus(event, lease)),
            reason=_reason(event),
            by=event.by if isinstance(event, ev.LeaseEnded) else None,
            note=event.why if isinstance(event, ev.LeaseEnded) else None,
        )


def _kind(event: ev.Event) -> RecentKind | None:
    """What is shown of an event; None if it is not shown."""
    if isinstance(event, ev.Configured) and event.table == "excluded":
        return "in_service" if event.value is None else "out_of_service"
    return _KINDS.get(type(event))


def _is_within(event: ev.Event, lease: Lease | None, scope: Target) -> bool:
    """Whether an event is of a GPU within the scope, or of a waiter that GPUs there may serve."""
    if scope.node is None:
        return True
    nodes = {key.node for key in _gpus(event, lease)}
    request = getattr(event, "request", None) or (lease.request if lease else None)
    return scope.node in nodes or (not nodes and request is not None and request.wishes.node in {None, scope.node})


def _reason(event: ev.Event) -> str | None:
    """Why; null of a warning that was withdrawn."""
    if isinstance(event, ev.Configured):
        return None if event.value is None else str(event.value)
    if isinstance(event, ev.LeaseEnded | ev.LeaseWarned):
        return None if event.reason is None else str(event.reason)
    return None


def _gpus(event: ev.Event, lease: Lease | None) -> tuple[GpuKey, ...]:
    match event:
        case ev.LeaseGranted(gpus=gpus):
            return gpus
        case ev.LeaseEnded() | ev.LeaseWarned():
            return () if lease is None or isinstance(lease, QueuedLease) else lease.gpus
        case ev.GpuDrained(gpu=gpu):
            return (gpu,)
        case ev.Configured(table="excluded", key=key):
            return (GpuKey(*key),)
    return ()
