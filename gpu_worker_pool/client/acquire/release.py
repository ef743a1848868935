"""Releasing a lease, also at a server that is away for a moment: it comes back with all its leases, this one included."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random

from gpu_worker_pool.client.backends.lease_book import LeaseAnswer, LeaseBook
from gpu_worker_pool.client.endpoints.endpoint import RETRY
from gpu_worker_pool.errors import EndpointError

logger = logging.getLogger("gpu_worker_pool.client")


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
            await asyncio.sleep(RETRY.delay_s(min(attempt, 10), random.random()))  # noqa: S311 - no secret
    except asyncio.CancelledError:
        _warn(lease_id, endpoint_id, reason)
        raise
    _warn(lease_id, endpoint_id, reason)


def _warn(lease_id: str, endpoint_id: str | None, reason: str) -> None:
    fields = {"lease_id": lease_id, "endpoint": endpoint_id}
    logger.warning(
        "lease %s could not be released, and ends with its TTL or its process: %s", lease_id, reason, extra=fields
    )
