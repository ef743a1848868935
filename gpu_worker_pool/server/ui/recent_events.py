"""The last events of the pool, for the page."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import DrainingLease, Lease, QueuedLease
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.ledger.driver import EventListener
from gpu_worker_pool.server.calls.lease_view import gpu_ref, iso_time
from gpu_worker_pool.wire.page import RecentEvent, RecentKind

KEPT = 50
LABEL = "command"

_KINDS: dict[type[ev.Event], RecentKind] = {
    ev.LeaseQueued: "queued",
    ev.LeaseGranted: "granted",
    ev.LeaseEnded: "ended",
    ev.GpuDrained: "drained",
    ev.GpuExcluded: "out_of_service",
    ev.GpuIncluded: "in_service",
}


class FollowedPool(Protocol):
    """The part of the pool that is needed here."""

    @property
    def state(self) -> PoolState:
        """The state of the pool."""

    def follow(self, listener: EventListener) -> None:
        """Call the listener with events."""


class _Noted(NamedTuple):
    """An event, and its lease at that time; None if it has no lease, or the lease is no longer known."""

    event: ev.Event
    lease: Lease | None


class RecentEvents:
    """Keeps the last `KEPT` events. An event is kept as it is, which is cheap; its view is made when it is asked for."""

    def __init__(self, pool: FollowedPool) -> None:
        self._pool = pool
        self._kept: deque[_Noted] = deque(maxlen=KEPT)
        pool.follow(self.follow)

    def follow(self, events: Sequence[ev.Event]) -> None:
        """Note events, without waits that ended in a grant at once."""
        told = [event for event in events if type(event) in _KINDS]
        if not told:
            return
        granted = {event.lease_id for event in told if isinstance(event, ev.LeaseGranted)}
        find = self._pool.state.find
        for event in told:
            lease_id = getattr(event, "lease_id", None)
            if lease_id not in granted or not isinstance(event, ev.LeaseQueued):
                self._kept.append(_Noted(event, None if lease_id is None else find(lease_id)))

    def views(self) -> tuple[RecentEvent, ...]:
        """The views, latest first."""
        return tuple(self._view(noted) for noted in reversed(self._kept))

    def _view(self, noted: _Noted) -> RecentEvent:
        event, state = noted.event, self._pool.state
        request = event.request if isinstance(event, ev.LeaseQueued) else noted.lease.request if noted.lease else None
        return RecentEvent(
            at=iso_time(event.at + state.wall_offset_s),
            kind=_KINDS[type(event)],
            lease_id=getattr(event, "lease_id", None),
            owner=request.holder.owner if request else None,
            worker_id=request.holder.worker_id if request else None,
            label=_label(request),
            gpus=tuple(gpu_ref(state, key) for key in _gpus(noted)),
            reason=str(event.reason) if isinstance(event, ev.LeaseEnded | ev.GpuExcluded) else None,
        )


def _label(request: Request | None) -> str | None:
    return dict(request.labels).get(LABEL) if request else None


def _gpus(noted: _Noted) -> tuple[GpuKey, ...]:
    match noted.event:
        case ev.LeaseGranted(gpus=gpus):
            return gpus
        case ev.LeaseEnded():
            lease = noted.lease.ended if isinstance(noted.lease, DrainingLease) else noted.lease
            return () if lease is None or isinstance(lease, QueuedLease) else lease.gpus
        case ev.GpuDrained(gpu=gpu) | ev.GpuExcluded(gpu=gpu) | ev.GpuIncluded(gpu=gpu):
            return (gpu,)
    return ()
