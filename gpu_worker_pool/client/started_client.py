"""What a client has while it is started: its endpoints, the leases it holds, and the requests under way."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.request import Holder, Request
from gpu_worker_pool.errors import (
    EndpointError,
    NoEndpointAnsweredError,
    PoolError,
    RequestRefusedError,
    ServiceUnavailableError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from gpu_worker_pool.models import Assignment

from .acquire.acquisition import Acquisition
from .acquire.heartbeat import Heartbeat
from .acquire.places import FIRST_ANSWER_S, GRACE_S, Places
from .acquire.release import Releases
from .asking import make_request, take_inside
from .backends.lease_backend import HeldLease, LeaseBackend
from .endpoints.endpoint import Endpoint
from .events import ClientEvent, EventKind, Hook, Tally, call_hook, ending_text, log_event
from .inherited_lease import InheritedLease
from .options import RequestWishes

T = TypeVar("T")
OnAssignment = Callable[[Assignment], None]
# How long a stop waits for GPUs to be released; at servers that do not answer, a thread goes on trying.
STOP_S = 2.0
# Of how many leases that have ended it is known which they were: a server may have shown them before.
MOST_ENDED = 1000


class StartedClient:
    """Made, used and stopped in one event loop. What its methods do is said at those of `GPUWorkerPoolClient`. `lease` is the one
    around this process, of which requests take GPUs unless they ask for new ones.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        on_event: Hook | None = None,
        on_lost: OnAssignment | None = None,
        on_ending: OnAssignment | None = None,
        lease: InheritedLease | None = None,
        why_not: Callable[[Endpoint], str | None] = lambda _: None,
    ) -> None:
        self._config = config
        self.tally = Tally()
        self._on_event = on_event
        self._on_lost, self._on_ending = on_lost, on_ending
        self._lease = lease
        # Two clients may run in processes of the same number, in two containers, say.
        self._worker_prefix, self._numbers = f"worker-{os.getpid()}-{os.urandom(3).hex()}-", itertools.count(1)
        self._releases = Releases(config)
        self._held: dict[str, HeldLease] = {}
        # The last leases that ended, as the keys.
        self._ended: dict[str, None] = {}
        self._heartbeats: dict[LeaseBackend, Heartbeat] = {}
        self.places = Places(config, self._held, self._ended, why_not)
        # The requests and releases that a stop waits for, and what tells it that one is over.
        self._under_way = 0
        self._one_is_over = asyncio.Event()

    def __len__(self) -> int:
        """How many GPUs are assigned."""
        return len(self._held)

    def is_own_worker(self, worker_id: str) -> bool:
        """Whether a worker of this id is one of this client."""
        return worker_id.startswith(self._worker_prefix)

    async def start(self, first_s: float = FIRST_ANSWER_S, grace_s: float = GRACE_S) -> None:
        """Poll the endpoints; see `Places.start`."""
        try:
            await self.places.start(first_s, grace_s)
        except BaseException:
            await self.places.stop()
            raise

    async def stop(self) -> None:
        """Release all GPUs, and stop."""
        if self._lease is not None:
            self._lease.release_all()
        self.places.say_that_it_stops()
        self._release_all()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    while self._under_way:
                        self._one_is_over.clear()
                        await self._one_is_over.wait()
            self._release_all()
            await self._releases.finish(STOP_S)
        finally:
            for heartbeat in self._heartbeats.values():
                await heartbeat.close()
            await self.places.stop()

    async def request(
        self, timeout_s: float, wishes: RequestWishes, worker_id: str | None = None, holder: Holder | None = None
    ) -> Assignment:
        """Get GPUs. However it ends, no lease that the caller does not know of is left behind."""
        worker_id = worker_id or f"{self._worker_prefix}{next(self._numbers)}"
        request = make_request(self._config, worker_id, wishes, holder)
        if self._lease is not None and not wishes.get("new"):
            return await self._take_inside(self._lease, request, timeout_s)
        lease_id = os.urandom(16).hex()

        def queued(endpoint_id: str, id_there: str, reason: str) -> None:
            self._tell(ClientEvent("waiting", worker_id, id_there, endpoint_id, detail=reason))

        self.tally.requests += 1
        self._tell(ClientEvent("requested", worker_id, lease_id))
        acquisition = Acquisition(
            self.places,
            lease_id,
            request,
            self._releases,
            on_queued=queued,
            on_waiting=lambda: self.tally.waiting.add(lease_id),
        )
        try:
            with self._noted():
                return self._keep(await acquisition.run(timeout_s))
        except PoolError as error:
            self.tally.failed += 1
            self._tell_failure(error, worker_id, lease_id)
            raise
        finally:
            self.tally.end_wait(lease_id)

    async def _take_inside(self, lease: InheritedLease, request: Request, timeout_s: float) -> Assignment:
        worker_id = request.holder.worker_id or ""

        def waiting() -> None:
            self._tell(ClientEvent("waiting", worker_id, lease.id, detail=lease.busy_text))

        try:
            taken = await take_inside(lease, request, timeout_s, is_multi=self._config.is_multi, on_waiting=waiting)
        except (WorkerTimeoutError, RequestRefusedError) as error:
            self._tell_failure(error, worker_id, lease.id)
            raise
        self._tell(_event("assigned", taken))
        return taken

    def _tell_failure(self, error: PoolError, worker_id: str, lease_id: str) -> None:
        if isinstance(error, WorkerTimeoutError):
            self._tell(ClientEvent("timed_out", worker_id, lease_id, detail=error.reason))
        else:
            self._tell(ClientEvent("failed", worker_id, lease_id, detail=str(error)))

    async def release(self, assignment: Assignment, note: str | None = None) -> None:
        """Release a GPU. The caller need not wait for a server that does not answer: the release goes on."""
        if self._lease is not None and self._lease.release(assignment):
            self._tell(_event("released", assignment))
            return
        lease = self._find(assignment)
        lease.end_note = note
        if lease.lost.is_set():
            # Seen here first: the clock says so, and no timer has run yet.
            self._heartbeat(lease).give_up_what_is_late()
            raise StaleAssignmentError(assignment, lease.lost.reason)
        self._end(lease)
        with self._noted():
            await self._releases.deliver(lease)

    def let_go(self, assignment: Assignment) -> None:
        """Leave a lease to another process, which keeps it alive and releases it."""
        lease = self._find(assignment)
        self._drop(lease)
        lease.lost.settle()

    async def retry(self, request_func: Callable[[], Awaitable[T]]) -> T:
        """Call this while an endpoint is up, until it succeeds."""
        limit, change = asyncio.timeout(self._config.worker_timeout), asyncio.Event()
        try:
            async with limit:
                with self.places.watched(change.set):
                    while True:
                        change.clear()
                        if self.places.is_up:
                            with suppress(EndpointError, ServiceUnavailableError):
                                return await request_func()
                        await change.wait()
                        if self.places.is_stopping:
                            raise RuntimeError("the client is not started: use `async with`, or call start() first")
        except TimeoutError:
            if not limit.expired():
                raise  # its own
            raise NoEndpointAnsweredError(self.places.reasons(), waited_s=self._config.worker_timeout) from None

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Have a stop wait for this."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            self._one_is_over.set()

    def _tell(self, event: ClientEvent) -> None:
        log_event(event)
        call_hook("on_event", self._on_event, event)

    # --- the leases it holds

    def _keep(self, lease: HeldLease) -> Assignment:
        self.tally.count_grant(lease.backend.endpoint_id)
        self._held[lease.id] = lease
        self._heartbeat(lease).add(lease)
        self._tell(_event("assigned", lease.assignment))
        return lease.assignment

    def _find(self, assignment: Assignment) -> HeldLease:
        """StaleAssignmentError where it is lost, ValueError where it is not here."""
        lease = self._held.get(getattr(assignment, "lease_id", None) or "")
        if lease is None:
            if getattr(assignment, "is_lost", False):
                raise StaleAssignmentError(assignment, getattr(assignment.lost, "reason", None))
            raise ValueError(f"{assignment!r} is not an assignment of this client, or was released before")
        return lease

    def _heartbeat(self, lease: HeldLease) -> Heartbeat:
        if lease.backend not in self._heartbeats:
            self._heartbeats[lease.backend] = Heartbeat(lease.backend, self._lose, self._warn)
        return self._heartbeats[lease.backend]

    def _release_all(self) -> None:
        for lease in list(self._held.values()):
            # A worker that still uses the GPU must hear that the lease has ended.
            lease.lost.set("the client was stopped")
            self._end(lease)
            self._releases.start_for(lease)

    def _end(self, lease: HeldLease) -> None:
        self._drop(lease)
        lease.lost.settle()
        self._tell(_event("released", lease.assignment))

    def _lose(self, lease: HeldLease) -> None:
        self._drop(lease)
        self._tell(_event("lost", lease.assignment, lease.lost.reason))
        call_hook("on_lost", self._on_lost, lease.assignment)
        # The server may only have missed the heartbeats; then the next waiter need not wait for the TTL.
        self._releases.start_for(lease)

    def _warn(self, lease: HeldLease) -> None:
        ending = lease.warned.ending
        self._tell(_event("going_on" if ending is None else "ending", lease.assignment, ending_text(ending)))
        call_hook("on_ending", self._on_ending, lease.assignment)

    def _drop(self, lease: HeldLease) -> None:
        del self._held[lease.id]
        self._heartbeat(lease).drop(lease.id)
        self._ended[lease.id] = None
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]


def _event(kind: EventKind, told: Assignment, detail: str | None = None) -> ClientEvent:
    return ClientEvent(kind, told.worker_id, told.lease_id or "", told.endpoint_id, told.gpu_id, detail)
