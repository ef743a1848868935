"""The leases that a client holds: kept alive until they are released or lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from gpu_worker_pool.client.backends.held_lease import HeldLease
from gpu_worker_pool.client.backends.lease_backend import LeaseBackend
from gpu_worker_pool.client.events import ClientEvent, EventKind, call_hook, ending_text
from gpu_worker_pool.errors import StaleAssignmentError
from gpu_worker_pool.models import Assignment

from .heartbeat import Heartbeat
from .release import RELEASE_S, Releases

OnAssignment = Callable[[Assignment], None]
# Of how many leases that have ended it is known which they were: a server may have shown them before.
MOST_ENDED = 1000


class HeldLeases:
    def __init__(
        self,
        releases: Releases,
        tell: Callable[[ClientEvent], None],
        on_lost: OnAssignment | None,
        on_ending: OnAssignment | None,
        *,
        is_multi: bool,
    ) -> None:
        self._releases = releases
        self._tell = tell
        self._on_lost, self._on_ending = on_lost, on_ending
        self._is_multi = is_multi
        self._held: dict[str, HeldLease] = {}
        self._heartbeats: dict[LeaseBackend, Heartbeat] = {}
        # The last leases that ended, as the keys.
        self.ended: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def workers(self, backends: Collection[LeaseBackend]) -> dict[str, dict[str, str]]:
        """The workers that have GPUs there, by the UUID of the GPU and the id of the lease."""
        found: dict[str, dict[str, str]] = {}
        for lease in self._held.values():
            for gpu in lease.gpus if lease.backend in backends else ():
                found.setdefault(gpu.key.uuid, {})[lease.id] = lease.worker_id
        return found

    def keep(self, lease: HeldLease) -> Assignment:
        """Keep a lease alive."""
        self._held[lease.id] = lease
        assignment = lease.assign(is_multi=self._is_multi)
        self._heartbeat(lease).add(lease)
        self._tell(_event("assigned", lease))
        return assignment

    async def release(self, assignment: Assignment) -> None:
        """Release a lease. The caller need not wait for a server that does not answer: the release goes on."""
        lease = self._find(assignment)
        if lease.lost.is_set():
            # Seen here first: the clock says so, and no timer has run yet.
            self._heartbeat(lease).give_up_what_is_late()
            raise StaleAssignmentError(assignment, lease.lost.reason)
        await asyncio.wait([self._release(lease)], timeout=RELEASE_S)

    def let_go(self, assignment: Assignment) -> None:
        """Keep a lease alive no longer, and do not release it: another process does both from now on."""
        lease = self._find(assignment)
        self._drop(lease)
        lease.lost.settle()

    def release_all(self, reason: str) -> None:
        for lease in list(self._held.values()):
            # A worker that still uses the GPU must hear that the lease has ended.
            lease.lost.set(reason)
            self._release(lease)

    async def close(self) -> None:
        """Send no more heartbeats."""
        for heartbeat in self._heartbeats.values():
            await heartbeat.close()

    def _heartbeat(self, lease: HeldLease) -> Heartbeat:
        if lease.backend not in self._heartbeats:
            self._heartbeats[lease.backend] = Heartbeat(lease.backend, self._lose, self._warn)
        return self._heartbeats[lease.backend]

    def _find(self, assignment: Assignment) -> HeldLease:
        """StaleAssignmentError where it is lost, ValueError where it is not here."""
        lease = self._held.get(getattr(assignment, "lease_id", None) or "")
        if lease is None:
            if getattr(assignment, "is_lost", False):
                raise StaleAssignmentError(assignment, getattr(assignment.lost, "reason", None))
            raise ValueError(f"{assignment!r} is not an assignment of this client, or was released before")
        return lease

    def _release(self, lease: HeldLease) -> asyncio.Task[None]:
        self._drop(lease)
        lease.lost.settle()
        self._tell(_event("released", lease))
        return self._leave(lease)

    def _leave(self, lease: HeldLease) -> asyncio.Task[None]:
        """Have its server told, in the background."""
        return self._releases.start(lease.backend, lease.id, is_local=lease.is_local)

    def _lose(self, lease: HeldLease) -> None:
        self._drop(lease)
        self._tell(_event("lost", lease, lease.lost.reason))
        call_hook("on_lost", self._on_lost, lease.assignment)
        # The server may only have missed the heartbeats; then the next waiter need not wait for the TTL.
        self._leave(lease)

    def _warn(self, lease: HeldLease) -> None:
        ending = lease.warned.ending
        self._tell(_event("going_on" if ending is None else "ending", lease, ending_text(ending)))
        call_hook("on_ending", self._on_ending, lease.assignment)

    def _drop(self, lease: HeldLease) -> None:
        del self._held[lease.id]
        self._heartbeat(lease).drop(lease.id)
        self.ended[lease.id] = None
        if len(self.ended) > MOST_ENDED:
            del self.ended[next(iter(self.ended))]


def _event(kind: EventKind, lease: HeldLease, detail: str | None = None) -> ClientEvent:
    endpoint_id, gpu_id = lease.backend.endpoint_id, lease.assignment.gpu_id
    return ClientEvent(kind, lease.worker_id, lease.id, endpoint_id, gpu_id, detail)
