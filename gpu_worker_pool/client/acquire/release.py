"""Releasing a lease, also at a server that is away for a moment: it comes back with all its leases, this one included."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Sequence

from gpu_worker_pool.client.backends.lease_book import LeaseAnswer, LeaseBook
from gpu_worker_pool.client.backends.server_leases import ServerLeases
from gpu_worker_pool.client.endpoints.endpoint import JITTER, RETRY, Endpoint
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.wire.transport import Transport

logger = logging.getLogger("gpu_worker_pool.client")


class Releases:
    """Releases leases in the background, each until it is delivered: a lease of a process that lives on never expires."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._under_way: dict[asyncio.Task[None], tuple[str | None, str]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def start(
        self,
        book: LeaseBook,
        lease_id: str,
        under_way: asyncio.Task[LeaseAnswer] | None = None,
        *,
        is_local: bool = False,
    ) -> asyncio.Task[None]:
        """Release a lease, once the call that is still under way for it has ended. `is_local`: it has no TTL."""
        task = asyncio.create_task(release_lease(book, lease_id, under_way), name="gpu-lease-release")
        self._under_way[task] = (book.endpoint_id if is_local else None, lease_id)
        task.add_done_callback(self._under_way.pop)
        return task

    async def finish(self, wait_s: float) -> None:
        """Wait for the releases, no longer than this. What has a TTL expires then; with what has none, a thread goes on
        while this process lives.
        """
        try:
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=wait_s)
        finally:
            left = [(endpoint_id, lease_id) for endpoint_id, lease_id in self._under_way.values() if endpoint_id]
            for task in self._under_way:
                task.cancel()
            if left:
                name = "gpu-lease-late-release"
                threading.Thread(target=_go_on, args=(self._config, left), name=name, daemon=True).start()


def _go_on(config: ClientConfig, left: Sequence[tuple[str, str]]) -> None:
    async def release_all() -> None:
        async with Transport(ca_file=config.ca_file, is_named=config.is_named) as transport:
            books = {id_: ServerLeases(Endpoint(id_, config.endpoints[id_], transport, config)) for id_, _ in left}
            await asyncio.gather(*(release_lease(books[id_], lease_id, None) for id_, lease_id in left))

    asyncio.run(release_all())


async def release_lease(book: LeaseBook, lease_id: str, under_way: asyncio.Task[LeaseAnswer] | None) -> None:
    """Release it, once the call that is still under way for it has ended, whatever its outcome."""
    if under_way is not None:
        try:
            await asyncio.wait([under_way])
        finally:
            under_way.cancel()
        if not under_way.cancelled():
            under_way.exception()  # its outcome no longer matters
    reason, endpoint_id = "the client was stopped", None
    try:
        for attempt in itertools.count():
            try:
                await book.release(lease_id)
            except EndpointError as error:
                reason, endpoint_id = error.reason, error.endpoint_id
                # Without an answer the lease may be there still, and would stay as long as this process.
                if error.status is not None and error.status < 500:
                    break
            else:
                return
            await asyncio.sleep(RETRY.delay_s(min(attempt, 10), JITTER.random()))
    except asyncio.CancelledError:
        _warn(lease_id, endpoint_id, reason)
        raise
    _warn(lease_id, endpoint_id, reason)


def _warn(lease_id: str, endpoint_id: str | None, reason: str) -> None:
    fields = {"lease_id": lease_id, "endpoint": endpoint_id}
    logger.warning(
        "lease %s could not be released: %s; it ends with its TTL or its process, or when its server is back",
        lease_id,
        reason,
        extra=fields,
    )
