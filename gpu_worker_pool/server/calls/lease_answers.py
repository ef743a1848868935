"""Answers about one lease. What a lease has from its request is encoded once: a worker asks for the same again and again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.http.response import JsonFrame, encode
from gpu_worker_pool.wire.leases import LeaseView

from .lease_view import end_note, env_of, gpu_refs, lease_view, moving_of_active

MOST_FRAMES = 256


class LeaseAnswers:
    """Keeps the last frames, by identity: of equal requests, the processes may differ."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Request, JsonFrame]] = {}

    def __repr__(self) -> str:
        return f"<LeaseAnswers: {len(self._kept)} frames kept>"

    def active(
        self, state: PoolState, lease: ActiveLease, now: float, *, by_uuid: bool, pool_id: str | None, asked: str | None
    ) -> bytes:
        """As the view of the lease; `by_uuid`, `pool_id` and `asked` are as there."""

        def view() -> LeaseView:
            return lease_view(state, lease, now, by_uuid=by_uuid, pool_id=pool_id, asked=asked)

        if len(lease.gpus) > 1:
            return encode(view())  # it may be a gang, whose parts say more
        gpus, moving = gpu_refs(state, lease.gpus), moving_of_active(state, lease, now)
        own = {
            "id": lease.id,
            "gpus": gpus,
            "fence": lease.fence,
            "requested_at": iso_time(lease.requested_at),
            "granted_at": iso_time(lease.granted_at),
            "expires_in_s": moving.pop("expires_in_s"),
            "env": env_of(gpus, by_uuid=by_uuid),
            **moving,
        }
        is_watched = lease.ttl_s is None
        return self._filled(lease.request, (is_watched, pool_id), own, view)

    def ended(self, state: PoolState, lease: EndedLease, now: float) -> bytes:
        """As the view of the lease."""
        own = {
            "id": lease.id,
            "gpus": gpu_refs(state, lease.gpus),
            "fence": lease.fence,
            "requested_at": iso_time(lease.requested_at),
            "granted_at": iso_time(lease.granted_at),
            "ended_at": iso_time(lease.ended_at),
            "ended_by": lease.by,
            "end_note": end_note(lease),
        }
        return self._filled(lease.request, lease.reason, own, lambda: lease_view(state, lease, now))

    def _filled(
        self, request: Request, shape: Hashable, own: Mapping[str, Any], view: Callable[[], LeaseView]
    ) -> bytes:
        """The view, of which `own` has all that does not follow from the request and the shape, in the order of the keys."""
        kept = self._kept.get((id(request), shape))
        if kept is None:
            if len(self._kept) >= MOST_FRAMES:
                self._kept.clear()
            gaps: Any = dict.fromkeys(own)
            kept = self._kept[id(request), shape] = request, JsonFrame(replace(view(), **gaps), own)
        return kept[1].fill(own.values())
