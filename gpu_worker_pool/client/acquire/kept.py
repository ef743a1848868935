"""The leases that a client has: kept alive until they are released or lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker_pool.client.events import ClientEvent, EventKind, call_hook, ending_text
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.errors import StaleAssignmentError
from gpu_worker_pool.models import GlobalGPUAssignment, GPUAssignment, LeaseEnding

from .acquisition import Won
from .assigned import make_assignment
from .lost import Lost
from .release import RELEASE_S, Releases
from .tally import Tally
from .warned import Warned

Assignment = GPUAssignment | GlobalGPUAssignment
OnAssignment = Callable[[Assignment], None]


@dataclass(eq=False, slots=True)
class Kept:
    """An assignment of this client, and how to release it."""

    assignment: Assignment
    won: Won
    lost: Lost
    warned: Warned

    def event(self, kind: EventKind, detail: str | None = None) -> ClientEvent:
        told = self.assignment
        return ClientEvent(kind, told.worker_id, self.won.lease_id, self.won.place.id, told.gpu_id, detail)


class KeptLeases:
    def __init__(
        self,
        releases: Releases,
        tally: Tally,
        tell: Callable[[ClientEvent], None],
        on_lost: OnAssignment | None,
        on_ending: OnAssignment | None,
        *,
        is_multi: bool,
    ) -> None:
        self._releases = releases
        self._tally = tally
        self._tell = tell
        self._on_lost, self._on_ending = on_lost, on_ending
        self._is_multi = is_multi
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, won: Won, request: Request) -> Assignment:
        """Keep a lease alive."""
        worker_id, heartbeat = request.holder.worker_id or "", won.place.heartbeat
        lost, warned = Lost(request.ttl_s, is_local=won.grant.is_local), Warned()
        assignment = make_assignment(won, worker_id, lost, warned, is_multi=self._is_multi)
        assignment.memory_mb = request.wishes.memory_mb
        kept = self._kept[won.lease_id] = Kept(assignment, won, lost, warned)
        if won.book.needs_heartbeat:
            heartbeat.add(won.lease_id, lost, won.safe_since)
        for gpu in won.grant.gpus:
            won.place.note_taken(gpu.key.uuid, worker_id)
        self._tally.count_grant(won.place.id)
        self._tell(kept.event("assigned"))
        return assignment

    def get(self, lease_id: str) -> Kept | None:
        return self._kept.get(lease_id)

    def find(self, assignment: Assignment) -> Kept:
        """StaleAssignmentError where it is lost, ValueError where it is not here."""
        kept = self._kept.get(getattr(assignment, "lease_id", None) or "")
        if kept is None:
            if getattr(assignment, "is_lost", False):
                raise StaleAssignmentError(assignment, getattr(assignment.lost, "reason", None))
            raise ValueError(f"{assignment!r} is not an assignment of this client, or was released before")
        return kept

    def release(self, kept: Kept) -> asyncio.Task[None]:
        """Release a lease in the background."""
        if self.drop(kept.won.lease_id):
            kept.lost.settle()
            self._tell(kept.event("released"))
        kept.won.place.heartbeat.drop(kept.won.lease_id)
        return self.leave(kept)

    async def release_soon(self, kept: Kept) -> None:
        """Release a lease. The caller need not wait for a server that does not answer: the release goes on."""
        await asyncio.wait([self.release(kept)], timeout=RELEASE_S)

    def release_all(self, reason: str) -> None:
        for kept in list(self._kept.values()):
            # A worker that still uses the GPU must hear that the lease has ended.
            kept.lost.set(reason)
            self.release(kept)

    def leave(self, kept: Kept) -> asyncio.Task[None]:
        """Have its server told, in the background."""
        return self._releases.start(kept.won.book, kept.won.lease_id, is_local=kept.lost.is_local)

    def lose(self, lease_id: str, reason: str, code: str | None = None) -> None:
        kept = self._kept.get(lease_id)
        if kept is None:
            return
        kept.lost.set(reason, code)
        self.drop(lease_id)
        self._tell(kept.event("lost", reason))
        call_hook("on_lost", self._on_lost, kept.assignment)
        # The server may only have missed the heartbeats; then the next waiter need not wait for the TTL.
        self.leave(kept)

    def warn(self, lease_id: str, ending: LeaseEnding | None) -> None:
        kept = self._kept.get(lease_id)
        if kept is not None and kept.warned.set(ending):
            self._tell(kept.event("going_on" if ending is None else "ending", ending_text(ending)))
            call_hook("on_ending", self._on_ending, kept.assignment)

    def drop(self, lease_id: str) -> bool:
        """Forget a lease; False where it is not here."""
        kept = self._kept.pop(lease_id, None)
        if kept is None:
            return False
        for gpu in kept.won.grant.gpus:
            kept.won.place.note_released(gpu.key.uuid, kept.assignment.worker_id)
        return True
