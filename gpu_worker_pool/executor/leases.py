"""The leases of an executor's workers: requested, watched and released by one client, in the executor's event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from gpu_worker_pool.client.guarded_lease import grace_after_loss, limit_of, on_lease_clock, safe_until
from gpu_worker_pool.client.inherited_lease import config_inside
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import ServiceUnavailableError, StaleAssignmentError
from gpu_worker_pool.host.clock import boot_time

from .guarded import Guarded
from .servers_here import find_servers_here

_UNLIMITED_S: Final = 1e9
_UPDATES_PER_TTL: Final = 20
_MAX_UPDATE_INTERVAL_S: Final = 1.0
# A worker that is not seen by the server is killed so long before an announced end, so that it is gone by then.
_KILL_AHEAD_S: Final = 0.5
# How soon to look again for a server, where tasks may wait for one.
_SERVER_PAUSE_S: Final = 0.2


class Leases:
    """Requests leases. `wishes` are those of `request_gpu`, `options` those of the client.

    A request fails after `timeout_s`, until which it also waits for a server that does not answer; None: it waits for a GPU
    as long as it takes, and for no server. `see_gpus` is told how many GPUs can be used here.
    """

    def __init__(
        self,
        wishes: Mapping[str, Any],
        options: Mapping[str, Any],
        see_gpus: Callable[[int], None],
        timeout_s: float | None,
    ) -> None:
        self._wishes = dict(wishes)
        self._options = dict(options)
        self._see_gpus = see_gpus
        self._is_limited = timeout_s is not None
        self._timeout_s = _UNLIMITED_S if timeout_s is None else timeout_s
        self._client: GPUWorkerPoolClient | None = None
        self._starting = asyncio.Lock()

    async def request(self, holder_pid: int) -> Assignment:
        """Wait for a lease that belongs to this process."""
        since = asyncio.get_running_loop().time()
        client, waited_s = await self._started_client(since)
        return await client.request_gpu(max(self._timeout_s - waited_s, 0.0), pid=holder_pid, **self._wishes)

    async def release(self, assignment: Assignment) -> None:
        """Release a lease. One that was lost needs none."""
        assert self._client is not None  # noqa: S101 - it has requested it
        with suppress(StaleAssignmentError, ValueError):
            await self._client.release_gpu(assignment)

    async def close(self) -> None:
        """Stop the client. What is still held is released."""
        if self._client is not None:
            await self._client.stop()

    async def _started_client(self, since: float) -> tuple[GPUWorkerPoolClient, float]:
        """The client, and how long it had to be waited for because no server answered."""
        waited_s = 0.0
        async with self._starting:
            while self._client is None:
                try:
                    self._client = await self._start_client()
                except ServiceUnavailableError:
                    waited_s = asyncio.get_running_loop().time() - since + _SERVER_PAUSE_S
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
            self._see_gpus(len(lease.gpus))
        else:
            here = await find_servers_here(config, os.environ, is_inside=lease is not None)
            self._wishes.setdefault("among", here.among)
            self._see_gpus(here.gpu_count)
            if config.is_named:
                several = list(here.urls) if config.is_multi else None
                single = None if config.is_multi else here.urls[0]
        client = GPUWorkerPoolClient(single, several, **{"scope": "box", **options})
        await client.start()
        return client


def grace_on(assignment: Assignment, grace_s: float) -> float:
    """What is left of a lease that has a TTL is less than that TTL. Of a short lease, half is left for tasks."""
    ttl_s = None if getattr(assignment.lost, "is_local", True) else getattr(assignment.lost, "ttl_s", None)
    limit = limit_of(assignment)
    grace_s = grace_s if limit is None else min(grace_s, max(limit - boot_time(), 0.0) / 2)
    return grace_s if ttl_s is None else grace_after_loss(grace_s, ttl_s)


async def watch(
    assignment: Assignment,
    guarded: Guarded,
    grace_s: float,
    on_warning: Callable[[str], None],
    on_lost: Callable[[str], None],
) -> None:
    """Tell the guard until when the lease is safe and when it ends, `on_warning` why it will end (a code of the server's,
    such as time_limit; empty: that is withdrawn), and `on_lost` why it was lost. Until it is cancelled.
    """
    async with asyncio.TaskGroup() as watching:
        watching.create_task(_watch_warnings(assignment, guarded, grace_s, on_warning))
        watching.create_task(_watch_safety(assignment, guarded))
        if assignment.lost is not None:
            on_lost(await assignment.lost.wait())


async def _watch_warnings(
    assignment: Assignment, guarded: Guarded, grace_s: float, on_warning: Callable[[str], None]
) -> None:
    notice, known = assignment.warned, None
    while notice is not None:
        if notice.ending != known:
            known = notice.ending
            if known is None:
                guarded.tell_limit(limit_of(assignment), grace_s)
            else:
                ahead_s = 0.0 if getattr(assignment.lost, "is_local", False) else _KILL_AHEAD_S
                guarded.tell_limit(on_lease_clock(known.ends_at) - ahead_s, grace_s)
            on_warning("" if known is None else known.reason)
        await notice.changed()


async def _watch_safety(assignment: Assignment, guarded: Guarded) -> None:
    ttl_s = getattr(assignment.lost, "ttl_s", None)
    while ttl_s is not None and (until := safe_until(assignment)) is not None:
        guarded.tell_safe_until(until)
        await asyncio.sleep(min(ttl_s / _UPDATES_PER_TTL, _MAX_UPDATE_INTERVAL_S))
