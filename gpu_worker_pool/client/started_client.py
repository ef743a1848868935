"""What a client has while it is started: its endpoints, the leases it keeps, and the requests under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.errors import (
    EndpointError,
    NoEndpointAnsweredError,
    PoolError,
    ServiceUnavailableError,
    WorkerTimeoutError,
)
from gpu_worker_pool.models import Assignment

from .acquire.acquisition import Acquisition
from .acquire.held_leases import HeldLeases, OnAssignment
from .acquire.places import Places
from .acquire.release import Releases
from .events import ClientEvent, Tally

T = TypeVar("T")
# How long a stop waits for GPUs to be released; at servers that do not answer, a thread goes on trying.
STOP_S = 2.0


class StartedClient:
    """Made, used and stopped in one event loop."""

    def __init__(
        self,
        config: ClientConfig,
        tally: Tally,
        *,
        tell: Callable[[ClientEvent], None],
        on_lost: OnAssignment | None,
        on_ending: OnAssignment | None,
    ) -> None:
        self._config = config
        self._tally = tally
        self._tell = tell
        self._releases = Releases(config)
        self._held = HeldLeases(self._releases, tell, on_lost, on_ending, is_multi=config.is_multi)
        self.places = Places(config, self._held)
        # The requests that a stop waits for, and what tells it that one is over.
        self._under_way = 0
        self._one_is_over = asyncio.Event()

    def __len__(self) -> int:
        """How many GPUs are assigned."""
        return len(self._held)

    async def start(self, *, waits_for_late: bool) -> None:
        """See `GPUWorkerPoolClient.start`, as all of these."""
        try:
            await self.places.start(waits_for_late=waits_for_late)
        except BaseException:
            await self.places.stop()
            raise

    async def stop(self) -> None:
        """Release all GPUs, and stop."""
        self.places.say_that_it_stops()
        why = "the client was stopped"
        self._held.release_all(why)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    while self._under_way:
                        self._one_is_over.clear()
                        await self._one_is_over.wait()
            self._held.release_all(why)
            await self._releases.finish(STOP_S)
        finally:
            await self._held.close()
            await self.places.stop()

    async def request(self, lease_id: str, request: Request, timeout_s: float) -> Assignment:
        """Get GPUs. However it ends, no lease that the caller does not know of is left behind."""
        worker_id = request.holder.worker_id or ""

        def waiting() -> None:
            self._tally.waiting.add(lease_id)

        def queued(endpoint_id: str, id_there: str, reason: str) -> None:
            waiting()
            self._tell(ClientEvent("waiting", worker_id, id_there, endpoint_id, detail=reason))

        try:
            with self._noted(), self._tally.counted(lease_id):
                self._tell(ClientEvent("requested", worker_id, lease_id))
                acquisition = Acquisition(
                    self.places, lease_id, request, self._releases, on_queued=queued, on_waiting=waiting
                )
                lease = await acquisition.run(timeout_s)
                self._tally.count_grant(lease.backend.endpoint_id)
                return self._held.keep(lease)
        except WorkerTimeoutError as error:
            self._tally.failed += 1
            self._tell(ClientEvent("timed_out", worker_id, lease_id, detail=error.reason))
            raise
        except PoolError as error:
            self._tally.failed += 1
            self._tell(ClientEvent("failed", worker_id, lease_id, detail=str(error)))
            raise

    async def release(self, assignment: Assignment) -> None:
        """Release a GPU."""
        await self._held.release(assignment)

    def let_go(self, assignment: Assignment) -> None:
        """Leave a lease to another process, which keeps it alive and releases it."""
        self._held.let_go(assignment)

    async def retry(self, request_func: Callable[[], Awaitable[T]]) -> T:
        """See `GPUWorkerPoolClient.queue_request_for_retry`."""
        limit = asyncio.timeout(self._config.worker_timeout)
        try:
            async with limit:
                with self.places.watched():
                    while True:
                        if self.places.is_up:
                            with suppress(EndpointError, ServiceUnavailableError):
                                return await request_func()
                        await asyncio.shield(self.places.changed())
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
