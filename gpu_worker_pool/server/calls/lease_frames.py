"""Leases in lists: what does not change of a lease is encoded once, and all answers share it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import ActiveLease, Lease, QueuedLease
from gpu_worker_pool.core.queue.explain import Explainer
from gpu_worker_pool.core.queue.planner import FreeAt
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.loop_share import LoopShare
from gpu_worker_pool.server.http.response import JsonFrame, encode
from gpu_worker_pool.wire.leases import GpuRef

from .lease_view import active_view, gpu_refs, lease_view, moving_of_active, moving_of_queued, queued_view


class _KeptFrame(NamedTuple):
    """`frame` is of this lease on these GPUs, which have no index and no name before they are read."""

    lease: QueuedLease | ActiveLease
    gpus: tuple[GpuRef, ...]
    frame: JsonFrame


class LeaseFrames:
    """Keeps a frame for each waiter and each active lease that was shown. One that has ended leaves nothing behind."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._state = pool.state
        self._kept: dict[str, _KeptFrame] = {}
        self._made = 0
        pool.follow(self._follow)

    def __repr__(self) -> str:
        return f"<LeaseFrames: {len(self._kept)} kept, {self._made} made>"

    async def encode(self, lease_ids: Iterable[str], loop_share: LoopShare) -> AsyncIterator[tuple[Lease, bytes]]:
        """Encode these leases; those that are not written are left out. It yields to other work in between."""
        lease_ids, pool = list(lease_ids), self.pool
        starts = await pool.expected_starts_in_turns(loop_share)
        explainer = Explainer(pool.state, pool.now())
        for lease_id in lease_ids:
            await loop_share.yield_if_due()
            lease = pool.state.leases.get(lease_id)
            if lease is not None and pool.is_written(lease_id):
                yield lease, self._encode(lease, explainer, starts)

    def _encode(self, lease: Lease, explainer: Explainer, starts: Mapping[str, FreeAt]) -> bytes:
        state, now = self.pool.state, self.pool.now()
        if isinstance(lease, ActiveLease):
            moving = moving_of_active(state, lease, now)
            return self._frame(lease, gpu_refs(state, lease.gpus), moving).fill(moving.values())
        if isinstance(lease, QueuedLease):
            moving = moving_of_queued(state, lease, now, explainer, starts)
            return self._frame(lease, (), moving).fill(moving.values())
        return encode(lease_view(state, lease, now))

    def _frame(self, lease: QueuedLease | ActiveLease, gpus: tuple[GpuRef, ...], keys: Mapping[str, Any]) -> JsonFrame:
        if self._state is not self.pool.state:
            # A candidate of a fleet starts over with another state; the events between the two are not told.
            self._state = self.pool.state
            self._kept.clear()
        kept = self._kept.get(lease.id)
        if kept is None or kept.lease is not lease or kept.gpus != gpus:
            view = active_view(lease, gpus) if isinstance(lease, ActiveLease) else queued_view(lease)
            kept = self._kept[lease.id] = _KeptFrame(lease, gpus, JsonFrame(view, keys))
            self._made += 1
        return kept.frame

    def _follow(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            if isinstance(event, ev.LeaseEnded):
                self._kept.pop(event.lease_id, None)
