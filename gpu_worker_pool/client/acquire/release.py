"""Releasing a lease, also at a server that is away for a moment: it comes back with all its leases, this one included."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gpu_worker_pool.client.backends.lease_backend import HeldLease, LeaseBackend
from gpu_worker_pool.client.backends.server_leases import ServerLeases
from gpu_worker_pool.client.endpoints.endpoint import JITTER, RETRY, Endpoint
from gpu_worker_pool.client.http.transport import Transport
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import EndpointError

logger = logging.getLogger("gpu_worker_pool.client")

# How long a release waits for the server; after that it goes on in the background.
RELEASE_S = 1.0


class Releases:
    """Releases leases in the background, each until it is delivered: a lease of a process that lives on never expires."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        # With the server that has a lease without a TTL, and the lease.
        self._under_way: dict[asyncio.Task[None], tuple[ServerLeases | None, str]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def start(
        self,
        backend: LeaseBackend,
        lease_id: str,
        under_way: asyncio.Task[Any] | None = None,
        *,
        is_local: bool = False,
    ) -> asyncio.Task[None]:
        """Release a lease, once the call that is still under way for it has ended. `is_local`: it has no TTL."""
        task = asyncio.create_task(_release(backend, lease_id, under_way), name="gpu-lease-release")
        self._under_way[task] = backend if is_local and isinstance(backend, ServerLeases) else None, lease_id
        task.add_done_callback(self._under_way.pop)
        return task

    def start_for(self, lease: HeldLease) -> asyncio.Task[None]:
        """Release a lease that was held."""
        return self.start(lease.backend, lease.id, is_local=lease.lost.is_local)

    async def deliver(self, lease: HeldLease) -> None:
        """Release a lease, and wait for the server for a while. What is not delivered by then goes on in the background."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                try:
                    await lease.backend.release(lease.id, lease.end_note)
                except EndpointError:
                    await asyncio.shield(self.start_for(lease))
                except asyncio.CancelledError:
                    self.start_for(lease)  # it may not have arrived; to release twice is harmless
                    raise

    async def finish(self, wait_s: float) -> None:
        """Wait for the releases, no longer than this. What has a TTL expires then; with what has none, a thread goes on
        while this process lives.
        """
        try:
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=wait_s)
        finally:
            left = [(backend, lease_id) for backend, lease_id in self._under_way.values() if backend is not None]
            for task in self._under_way:
                task.cancel()
            if left:
                name = "gpu-lease-late-release"
                threading.Thread(target=_go_on, args=(self._config, left), name=name, daemon=True).start()


def _go_on(config: ClientConfig, left: Sequence[tuple[ServerLeases, str]]) -> None:
    """Go on with these in another loop, which needs connections of its own."""

    async def release_all() -> None:
        async with Transport.of(config) as transport:
            endpoints = {id_: Endpoint(id_, url, transport, config) for id_, url in config.endpoints.items()}
            await asyncio.gather(
                *(_release(backend.with_endpoints(endpoints), lease_id, None) for backend, lease_id in left)
            )

    asyncio.run(release_all())


async def _release(backend: LeaseBackend, lease_id: str, under_way: asyncio.Task[Any] | None) -> None:
    """Release it, once the call that is still under way for it has ended, whatever its outcome."""
    if under_way is not None:
        try:
            await asyncio.wait([under_way])
        finally:
            under_way.cancel()
        if not under_way.cancelled():
            under_way.exception()  # its outcome no longer matters
    reason: str | None = "the client was stopped"
    endpoint_id = backend.endpoint_id
    try:
        for attempt in itertools.count():
            try:
                await backend.release(lease_id)
            except EndpointError as error:
                reason, endpoint_id = error.reason, error.endpoint_id
                # Without an answer the lease may be there still, and would stay as long as this process.
                if error.status is not None and error.status < 500:
                    return
            else:
                reason = None
                return
            await asyncio.sleep(RETRY.delay_s(min(attempt, 10), JITTER.random()))
    finally:
        if reason is not None:
            logger.warning(
                "lease %s could not be released: %s; it ends with its TTL or its process, or when its server is back",
                lease_id,
                reason,
                extra={"lease_id": lease_id, "endpoint": endpoint_id},
            )
