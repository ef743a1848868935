"""What a client has while it is started: its endpoints, the leases it keeps, and the requests under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.errors import (
    EndpointError,
    NoEndpointAnsweredError,
    PoolError,
    ServiceUnavailableError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from gpu_worker_pool.host.clock import boot_time

from .acquire.acquisition import Acquisition
from .acquire.here import RequestHere
from .acquire.kept import Assignment, Kept, KeptLeases, OnAssignment
from .acquire.release import RELEASE_S, Releases, warn_of_lease
from .acquire.tally import Tally
from .endpoints.known_endpoints import KnownEndpoints
from .events import ClientEvent

T = TypeVar("T")
# How long a stop waits for GPUs to be released; at servers that do not answer, a thread goes on trying.
STOP_S = 2.0


class StartedClient:
    """Made and stopped in its loop. A request and a release may be begun in another thread: there they go as far as they
    can without the loop, and suspend once; after that they must be continued in the loop.
    """

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
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._releases = Releases(config)
        self._kept = KeptLeases(self._releases, tally, tell, on_lost, on_ending, is_multi=config.is_multi)
        self.known = KnownEndpoints(config, self._kept.lose, self._kept.warn, self._see)
        # What a stop waits for, and what tells it that one is over.
        self._under_way: set[object] = set()
        self._one_is_over: asyncio.Event | None = None

    def __len__(self) -> int:
        """How many GPUs are assigned."""
        return len(self._kept)

    async def start(self, *, waits_for_late: bool) -> None:
        """See `GPUWorkerPoolClient.start`, as all of these."""
        try:
            await self.known.start(waits_for_late=waits_for_late)
        except BaseException:
            await self.known.stop()
            raise

    async def stop(self) -> None:
        """Release all GPUs, and stop."""
        self.known.say_that_it_stops()
        why = "the client was stopped"
        self._kept.release_all(why)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    over = self._one_is_over = asyncio.Event()
                    while self._under_way:
                        await over.wait()
                        over.clear()
            self._kept.release_all(why)
            await self._releases.finish(STOP_S)
        finally:
            await self.known.stop()

    async def request(self, lease_id: str, request: Request, timeout_s: float) -> Assignment:
        """Get GPUs. However it ends, no lease that the caller does not know of is left behind."""
        worker_id = request.holder.worker_id or ""
        here: RequestHere | None = None
        try:
            with self._noted(), self._tally.counted(lease_id):
                self._tell(ClientEvent("requested", worker_id, lease_id))
                if self._is_elsewhere():
                    here = self._begin_here(lease_id, request, timeout_s)
                    if here is not None:
                        self._tally.waiting.add(lease_id)  # its first answer may be held back
                    won = None if here is None else here.run(self.known, self._on_queued(lease_id, worker_id))
                    if won is not None:
                        return self._kept.keep(won, request, self._loop)
                    await asyncio.sleep(0)  # it goes on in the loop's thread
                acquisition = self._acquisition(lease_id, request, here)
                here = None
                return self._kept.keep(await acquisition.run(timeout_s), request)
        except WorkerTimeoutError as error:
            self._tally.failed += 1
            self._tell(ClientEvent("timed_out", worker_id, lease_id, detail=error.reason))
            raise
        except PoolError as error:
            self._tally.failed += 1
            self._tell(ClientEvent("failed", worker_id, lease_id, detail=str(error)))
            raise
        except BaseException:
            if here is not None:
                # The caller was interrupted, and will not hear of it.
                try:
                    self._loop.call_soon_threadsafe(self._leave, here)
                except RuntimeError:
                    warn_of_lease(lease_id, here.place.id, "the client was stopped")
            raise

    async def release(self, assignment: Assignment) -> None:
        """Release a GPU."""
        if self._is_elsewhere():
            with self._noted():
                kept = self._kept.find(assignment)
                try:
                    if self._release_here(kept):
                        return
                except BaseException:
                    self._release_in_loop(kept)  # the caller was interrupted
                    raise
            await asyncio.sleep(0)  # it goes on in the loop's thread
        kept = self._kept.find(assignment)
        if kept.lost.is_set():
            # Seen here first: the clock says so, and no timer has run yet.
            heartbeat = kept.won.place.heartbeat
            heartbeat.drop(kept.won.lease_id)
            self._kept.lose(kept.won.lease_id, heartbeat.why_late)
            raise StaleAssignmentError(assignment, kept.lost.reason)
        await self._kept.release_soon(kept)

    async def retry(self, request_func: Callable[[], Awaitable[T]]) -> T:
        """See `GPUWorkerPoolClient.queue_request_for_retry`."""
        limit = asyncio.timeout(self._config.worker_timeout)
        try:
            async with limit:
                while True:
                    if self.known.is_up:
                        with suppress(EndpointError, ServiceUnavailableError):
                            return await request_func()
                    await asyncio.shield(self.known.changed())
                    if self.known.is_stopping:
                        raise RuntimeError("the client is not started: use `async with`, or call start() first")
        except TimeoutError:
            if not limit.expired():
                raise  # its own
            raise NoEndpointAnsweredError(self.known.reasons(), waited_s=self._config.worker_timeout) from None

    def _see(self, active: Iterable[str]) -> None:
        self._releases.see(lease_id for lease_id in active if self._kept.get(lease_id) is None)

    def _is_elsewhere(self) -> bool:
        return threading.get_ident() != self._loop_thread

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Have a stop wait for this."""
        this = object()
        try:
            self._under_way.add(this)
            yield
        finally:
            self._under_way.discard(this)
            if self._one_is_over is not None:
                with suppress(RuntimeError):  # the loop has ended meanwhile
                    self._loop.call_soon_threadsafe(self._one_is_over.set)

    def _on_queued(self, lease_id: str, worker_id: str) -> Callable[[str, str, str], None]:
        def queued(endpoint_id: str, id_there: str, reason: str) -> None:
            self._tally.waiting.add(lease_id)
            self._tell(ClientEvent("waiting", worker_id, id_there, endpoint_id, detail=reason))

        return queued

    def _acquisition(self, lease_id: str, request: Request, begun: RequestHere | None) -> Acquisition:
        leave, on_queued = self._releases.start, self._on_queued(lease_id, request.holder.worker_id or "")
        return Acquisition(self.known, lease_id, request, leave, self._tally, on_queued=on_queued, begun=begun)

    def _begin_here(self, lease_id: str, request: Request, timeout_s: float) -> RequestHere | None:
        """The request, if it can be made in this thread; nothing is sent yet."""
        places = self.known.places() if len(self.known.members) == 1 else []
        if not places or places[0].fleet is not None or not places[0].member.endpoint.can_block():
            return None
        return RequestHere(places[0], lease_id, request, timeout_s)

    def _leave(self, here: RequestHere) -> None:
        kept = self._kept.get(here.lease_id)
        if kept is None:
            self._releases.start(here.book, here.lease_id)
        else:
            self._kept.release(kept)

    def _release_here(self, kept: Kept) -> bool:
        """Release a lease in this thread; False where the loop has to do it."""
        won, until = kept.won, boot_time() + RELEASE_S
        endpoint = won.place.member.endpoint
        is_simple = won.book.needs_heartbeat and won.place.fleet is None and endpoint.can_block()
        if not is_simple or kept.lost.is_set() or not self._kept.end(kept):
            return False
        try:
            won.place.heartbeat.drop_soon(won.lease_id, self._loop)
            endpoint.run_here(won.book.release(won.lease_id), until)
            self._releases.note(won.book, won.lease_id)
        except (EndpointError, TimeoutError):
            with suppress(TimeoutError):
                self._release_in_loop(kept).result(max(until - boot_time(), 0.0))
        return True

    def _release_in_loop(self, kept: Kept) -> Future[None]:
        async def release() -> None:
            await self._kept.release_soon(kept)

        return asyncio.run_coroutine_threadsafe(release(), self._loop)
