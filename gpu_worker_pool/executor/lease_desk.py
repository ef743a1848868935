"""The leases of an executor's workers: an event loop in a thread of its own requests, keeps and releases them.

It is a thread apart from the one that passes tasks on, so that no task, however large, delays a heartbeat.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from gpu_worker_pool.client.guarded_lease import (
    command_env,
    grace_after_loss,
    limit_of,
    on_lease_clock,
    safe_until,
)
from gpu_worker_pool.client.inherited_lease import config_inside
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import ServiceUnavailableError, StaleAssignmentError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.models import LeaseEnding

from .servers_here import find_servers_here
from .worker_process import WorkerLease

_UNLIMITED_S: Final = 1e9
_UPDATES_PER_TTL: Final = 20
_MAX_UPDATE_INTERVAL_S: Final = 1.0
# A worker that is not seen by the server is killed so long before an announced end, so that it is gone by then.
_KILL_AHEAD_S: Final = 0.5
_END_S: Final = 10.0
# How soon to look again for a server, where tasks may wait for one.
_SERVER_PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    worker: int
    lease: WorkerLease


@dataclass(frozen=True, slots=True)
class LeaseRefusal:
    worker: int
    error: Exception


@dataclass(frozen=True, slots=True)
class LeaseLoss:
    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseNotice:
    """The server will end the lease at this time, on the clock of leases; None: it has withdrawn that. `reason` is a code
    of the server's, such as time_limit.
    """

    worker: int
    ends_at: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LeaseSafety:
    """The lease is safe until then, on the clock of leases."""

    worker: int
    until: float


@dataclass(frozen=True, slots=True)
class LeaseReturn:
    """The worker has no lease any more."""

    worker: int


@dataclass(frozen=True, slots=True)
class GpusSeen:
    """So many GPUs can be used here."""

    count: int


LeaseNews = LeaseGrant | LeaseRefusal | LeaseLoss | LeaseNotice | LeaseSafety | LeaseReturn | GpusSeen


class LeaseDesk:
    """Requests leases for workers, and tells `post` what becomes of them. No method waits, except `close`.

    `wishes` are those of `request_gpu`, `options` those of the client. A request fails after `timeout_s`, until
    which it also waits for a server that does not answer; None: it waits for a GPU as long as it takes, and for no server.
    """

    def __init__(
        self,
        wishes: Mapping[str, Any],
        options: Mapping[str, Any],
        post: Callable[[LeaseNews], None],
        *,
        timeout_s: float | None,
        grace_s: float,
    ) -> None:
        self._wishes = dict(wishes)
        self._options = dict(options)
        self._post = post
        self._is_limited = timeout_s is not None
        self._timeout_s = _UNLIMITED_S if timeout_s is None else timeout_s
        self._grace_s = grace_s
        self._client: GPUWorkerPoolClient | None = None
        self._starting = asyncio.Lock()
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._held: dict[int, Assignment] = {}
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="gpu-executor-leases", daemon=True)
        self._thread.start()

    def request(self, worker: int, holder_pid: int) -> None:
        """Request a lease that belongs to this process."""
        self._call(partial(self._start_request, worker, holder_pid))

    def withdraw(self, worker: int) -> None:
        """Stop a request, if it still waits; `release` must follow in any case."""
        self._call(partial(self._stop_request, worker))

    def release(self, worker: int) -> None:
        """Release the lease, or what is left of the request."""
        self._call(lambda: self._spawn(self._release(worker)))

    def close(self) -> None:
        """Stop the client and the thread. What is still held is released."""
        self._call(lambda: self._spawn(self._stop()))
        self._thread.join(_END_S)

    def _call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._loop.create_task(work)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    async def _stop(self) -> None:
        left = [*self._requests.values(), *self._watches.values()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._client is not None:
            await self._client.stop()
        self._loop.stop()

    def _start_request(self, worker: int, holder_pid: int) -> None:
        self._requests[worker] = self._spawn(self._request(worker, holder_pid))

    def _stop_request(self, worker: int) -> None:
        if (task := self._requests.get(worker)) is not None:
            task.cancel()

    async def _request(self, worker: int, holder_pid: int) -> None:
        since = self._loop.time()
        try:
            client, waited_s = await self._started_client(since)
            timeout_s = max(self._timeout_s - waited_s, 0.0)
            assignment = await client.request_gpu(timeout_s, pid=holder_pid, **self._wishes)
        except Exception as error:  # noqa: BLE001 - whatever it is, the tasks must hear of it
            self._post(LeaseRefusal(worker, error))
            return
        self._held[worker] = assignment
        self._watches[worker] = self._spawn(self._watch(worker, assignment))
        self._post(LeaseGrant(worker, self._lease(assignment)))

    async def _started_client(self, since: float) -> tuple[GPUWorkerPoolClient, float]:
        """The client, and how long it had to be waited for because no server answered."""
        waited_s = 0.0
        async with self._starting:
            while self._client is None:
                try:
                    self._client = await self._start_client()
                except ServiceUnavailableError:
                    waited_s = self._loop.time() - since + _SERVER_PAUSE_S
                    # Without a limit, the caller is told at once, as by the client itself.
                    if not self._is_limited or waited_s >= self._timeout_s:
                        raise
                    await asyncio.sleep(_SERVER_PAUSE_S)
            return self._client, waited_s

    async def _start_client(self) -> GPUWorkerPoolClient:
        options = dict(self._options)
        single, several = options.pop("service_endpoint", None), options.pop("service_endpoints", None)
        known = {name: value for name, value in options.items() if not name.startswith("on_")}
        config, lease = config_inside(partial(ClientConfig.build, **known), single, several)
        if lease is not None and not self._wishes.get("new"):
            self._post(GpusSeen(len(lease.gpus)))
        else:
            here = await find_servers_here(config, os.environ, is_inside=lease is not None)
            self._wishes.setdefault("among", here.among)
            self._post(GpusSeen(here.gpu_count))
            if config.is_named:
                several = list(here.urls) if config.is_multi else None
                single = None if config.is_multi else here.urls[0]
        client = GPUWorkerPoolClient(single, several, **{"scope": "box", **options})
        await client.start()
        return client

    def _lease(self, assignment: Assignment) -> WorkerLease:
        return WorkerLease(
            command_env(os.environ, assignment),
            tuple(assignment.gpu_ids),
            self._grace(assignment),
            safe_until(assignment),
            limit_of(assignment),
        )

    def _grace(self, assignment: Assignment) -> float:
        """What is left of a lease that has a TTL is less than that TTL. Of a short lease, half is left for tasks."""
        ttl_s = None if getattr(assignment.lost, "is_local", True) else getattr(assignment.lost, "ttl_s", None)
        limit = limit_of(assignment)
        grace_s = self._grace_s if limit is None else min(self._grace_s, max(limit - boot_time(), 0.0) / 2)
        return grace_s if ttl_s is None else grace_after_loss(grace_s, ttl_s)

    async def _watch(self, worker: int, assignment: Assignment) -> None:
        watches = [
            self._spawn(self._watch_warnings(worker, assignment)),
            self._spawn(self._watch_safety(worker, assignment)),
        ]
        try:
            if assignment.lost is not None:
                self._post(LeaseLoss(worker, await assignment.lost.wait()))
        finally:
            for task in watches:
                task.cancel()

    async def _watch_warnings(self, worker: int, assignment: Assignment) -> None:
        notice = assignment.warned
        known: LeaseEnding | None = None
        while notice is not None:
            if notice.ending != known:
                known = notice.ending
                is_seen = getattr(assignment.lost, "is_local", False)
                ahead_s = 0.0 if is_seen else _KILL_AHEAD_S
                if known is None:
                    self._post(LeaseNotice(worker, None))
                else:
                    self._post(LeaseNotice(worker, on_lease_clock(known.ends_at) - ahead_s, known.reason))
            await notice.changed()

    async def _watch_safety(self, worker: int, assignment: Assignment) -> None:
        ttl_s = getattr(assignment.lost, "ttl_s", None)
        while ttl_s is not None and (until := safe_until(assignment)) is not None:
            self._post(LeaseSafety(worker, until))
            await asyncio.sleep(min(ttl_s / _UPDATES_PER_TTL, _MAX_UPDATE_INTERVAL_S))

    async def _release(self, worker: int) -> None:
        if (request := self._requests.pop(worker, None)) is not None:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        if (watch := self._watches.pop(worker, None)) is not None:
            watch.cancel()
        assignment = self._held.pop(worker, None)
        if assignment is not None and self._client is not None:
            with suppress(StaleAssignmentError, ValueError):
                await self._client.release_gpu(assignment)
        self._post(LeaseReturn(worker))
