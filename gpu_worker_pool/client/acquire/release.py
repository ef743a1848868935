"""Releasing a lease, also at a server that is away for a moment: it comes back with all its leases, this one included."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu_worker_pool.client.backends.fleet_leases import FleetLeases
from gpu_worker_pool.client.backends.lease_book import LeaseBook
from gpu_worker_pool.client.backends.server_leases import ServerLeases
from gpu_worker_pool.client.endpoints.endpoint import JITTER, RETRY, Endpoint
from gpu_worker_pool.client.http.transport import Transport
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import EndpointError

logger = logging.getLogger("gpu_worker_pool.client")

# How long a release waits for the server; after that it goes on in the background.
RELEASE_S = 1.0
# Of how many released leases it is known which they were.
MOST_REMEMBERED = 4096


class Releases:
    """Releases leases in the background, each until it is delivered: a lease of a process that lives on never expires."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._under_way: dict[asyncio.Task[None], tuple[LeaseBook | None, str]] = {}
        # The leases that were released last, and where.
        self._released: OrderedDict[str, LeaseBook] = OrderedDict()

    def __len__(self) -> int:
        return len(self._under_way)

    def start(
        self,
        book: LeaseBook,
        lease_id: str,
        under_way: asyncio.Task[Any] | None = None,
        *,
        is_local: bool = False,
        kept_in: str | None = None,
    ) -> asyncio.Task[None]:
        """Release a lease, once the call that is still under way for it has ended. `is_local`: it has no TTL. In the pool
        `kept_in` this id is a lease that is kept: if that pool answers here, nothing is released.
        """
        task = asyncio.create_task(release_lease(book, lease_id, under_way, kept_in), name="gpu-lease-release")
        self._under_way[task] = (book if is_local and book.endpoint_id is not None else None, lease_id)

        def end(task: asyncio.Task[None]) -> None:
            del self._under_way[task]
            if kept_in is None:
                self.note(book, lease_id)

        task.add_done_callback(end)
        return task

    def note(self, book: LeaseBook, lease_id: str) -> None:
        """Remember a lease that was released."""
        self._released[lease_id] = book
        if len(self._released) > MOST_REMEMBERED:
            self._released.popitem(last=False)

    def see(self, active: Iterable[str]) -> None:
        """Release what was released before, and is active again: a database that fails over may lose an end, or a box may
        bring back a grant that the client gave up. As long as this process lives, nothing else would end it.
        """
        for lease_id in active:
            book = self._released.pop(lease_id, None)
            if book is not None:
                logger.info("lease %s is there again, and is released again", lease_id, extra={"lease_id": lease_id})
                self.start(book, lease_id)

    async def finish(self, wait_s: float) -> None:
        """Wait for the releases, no longer than this. What has a TTL expires then; with what has none, a thread goes on
        while this process lives.
        """
        try:
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=wait_s)
        finally:
            left = [(book, lease_id) for book, lease_id in self._under_way.values() if book is not None]
            for task in self._under_way:
                task.cancel()
            if left:
                name = "gpu-lease-late-release"
                threading.Thread(target=_go_on, args=(self._config, left), name=name, daemon=True).start()


def _go_on(config: ClientConfig, left: Sequence[tuple[LeaseBook, str]]) -> None:
    """Go on with these in another loop, which needs connections of its own."""

    async def release_all() -> None:
        async with Transport(ca_file=config.ca_file, is_named=config.is_named) as transport:
            endpoints = {id_: Endpoint(id_, url, transport, config) for id_, url in config.endpoints.items()}
            await asyncio.gather(*(release_lease(_again(book, endpoints), lease_id, None) for book, lease_id in left))

    asyncio.run(release_all())


def _again(book: LeaseBook, endpoints: Mapping[str, Endpoint]) -> LeaseBook:
    if not isinstance(book, FleetLeases):
        return ServerLeases(endpoints[book.endpoint_id or ""])
    entries = [ServerLeases(endpoints[id_], book.fleet_id) for id_ in book.endpoint_ids]
    return FleetLeases(book.fleet_id, endpoints[book.endpoint_id], lambda: entries)


async def release_lease(
    book: LeaseBook, lease_id: str, under_way: asyncio.Task[Any] | None, kept_in: str | None = None
) -> None:
    """Release it, once the call that is still under way for it has ended, whatever its outcome. In the pool `kept_in` the
    id is a lease that is kept.
    """
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
                # A server may have joined that pool since it was asked.
                if kept_in is None or await book.pool_id() != kept_in:
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
        warn_of_lease(lease_id, endpoint_id, reason)
        raise
    warn_of_lease(lease_id, endpoint_id, reason)


def warn_of_lease(lease_id: str, endpoint_id: str | None, reason: str) -> None:
    """Tell the user of a lease that may still be there."""
    fields = {"lease_id": lease_id, "endpoint": endpoint_id}
    logger.warning(
        "lease %s could not be released: %s; it ends with its TTL or its process, or when its server is back",
        lease_id,
        reason,
        extra=fields,
    )
