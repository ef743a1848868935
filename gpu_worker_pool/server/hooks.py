"""Tells the operator's hooks of what happens in the pool that this server leads.

It follows events once they are written, and only puts notices into a bounded queue: no decision waits for a hook.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import stale_at
from gpu_worker_pool.core.queue.idleness import idle_s
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.notify.notice import WARNINGS, Notice, NoticeGpu, Occasion
from gpu_worker_pool.notify.rules import Rule
from gpu_worker_pool.notify.sender import Sender

from .authority.pool import Pool

# How often it is looked for GPUs that compute nothing, and for nodes that are not heard of.
LOOK_EVERY_S = 5.0
# What is under way when the server stops may take so long.
FINISH_S = 1.0
# Ends that the holder knows of: it released the lease, or cancelled its request.
_OWN_ENDS = frozenset({EndReason.RELEASED, EndReason.CANCELLED})


class Hooks:
    """Without rules it does nothing, and costs nothing."""

    def __init__(self, pool: Pool, rules: Sequence[Rule], *, reads_every_s: float) -> None:
        self._pool = pool
        self._look_every_s = min(LOOK_EVERY_S, reads_every_s)
        self._rules = tuple(rules)
        self._sender: Sender | None = None
        self._looking: asyncio.Task[None] | None = None
        # Of which the hooks were told, so that they are told once.
        self._idle: set[str] = set()
        self._unknown: set[str] = set()

    def start(self) -> None:
        """Begin to tell. In the event loop of the server."""
        if not self._rules:
            return
        self._sender = Sender(boot_time)
        self._pool.follow(self._follow)
        self._looking = asyncio.ensure_future(self._look_often())

    async def stop(self) -> None:
        """Send what is under way, and end."""
        if self._looking is not None:
            self._looking.cancel()
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.finish(FINISH_S)

    def _follow(self, events: Sequence[ev.Event]) -> None:
        sender = self._sender
        if sender is None or not self._pool.leads:
            return
        for event in events:
            for notice in self._notices(event):
                sender.tell(notice, self._rules)

    def _notices(self, event: ev.Event) -> Iterator[Notice]:
        state, wall_offset_s = self._pool.state, self._pool.state.wall_offset_s
        match event:
            case ev.LeaseGranted():
                yield self._of_lease(event.lease_id, Occasion.GRANTED, event.at)
            case ev.LeaseWarned():
                if event.reason is not None and (occasion := WARNINGS.get(event.reason)) is not None:
                    if occasion is Occasion.IDLE:
                        self._idle.add(event.lease_id)
                    yield self._of_lease(event.lease_id, occasion, event.at, ends_at=event.ends + wall_offset_s)
            case ev.LeaseEnded():
                self._idle.discard(event.lease_id)
                ended = state.ended.get(event.lease_id)
                was_granted = bool(event.draining) or (ended is not None and ended.granted_at is not None)
                is_own = event.reason in _OWN_ENDS and event.by is None
                for occasion in (() if is_own else (Occasion.LOST,)) + (Occasion.ENDED,) if was_granted else ():
                    yield self._of_lease(
                        event.lease_id, occasion, event.at, reason=event.reason, by=event.by, why=event.why
                    )

    def _of_lease(self, lease_id: str, occasion: Occasion, at: float, **parts: object) -> Notice:
        state = self._pool.state
        lease = state.leases.get(lease_id) or state.ended.get(lease_id)
        request = None if lease is None else lease.request
        return Notice(
            occasion,
            at + state.wall_offset_s,
            lease_id,
            None if request is None else request.holder.owner,
            tuple(map(self._gpu, getattr(lease, "gpus", ()) or ())),
            labels=() if request is None else request.labels,
            **parts,  # type: ignore[arg-type]
        )

    def _gpu(self, key: GpuKey) -> NoticeGpu:
        slot = self._pool.state.slots.get(key)
        gpu = None if slot is None else slot.gpu
        return NoticeGpu(key.node, key.uuid, None if gpu is None else gpu.index)

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            if self._sender is not None and self._pool.leads:
                self._look(self._sender)

    def _look(self, sender: Sender) -> None:
        """Tell of what lasts, once it has begun."""
        state, now = self._pool.state, self._pool.now()
        idle, unknown = idle_leases(state, now), unknown_nodes(state, now)
        for lease_id in sorted(idle - self._idle):
            sender.tell(self._of_lease(lease_id, Occasion.IDLE, now), self._rules)
        for node in sorted(unknown - self._unknown):
            why = "its GPUs have not been read lately"
            sender.tell(Notice(Occasion.NODE_UNKNOWN, self._pool.wall_now(), node=node, why=why), self._rules)
        self._idle, self._unknown = idle, unknown


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
