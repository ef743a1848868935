"""The lease of a job that an earlier keeper started: renewed, and followed to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from math import inf
from typing import Final

from gpu_worker_pool.client.acquire.heartbeat import Heartbeat
from gpu_worker_pool.client.backends.held_lease import HeldLease
from gpu_worker_pool.client.backends.server_leases import ServerLeases
from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.client.http.transport import Transport
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.request import Request, Wishes
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.jobs.life import RunLease
from gpu_worker_pool.models import GPUAssignment
from gpu_worker_pool.notices import EndNotice, Loss

from .job_pools import environment_of

_ASK_AGAIN_S: Final = 1.0
_UNKNOWN_GPU: Final = 0


@asynccontextmanager
async def adopted_lease(facts: RunLease, since: float, environ: Mapping[str, str]) -> AsyncIterator[GPUAssignment]:
    """The assignment of a lease that is held already, `since` then. A loss or a warning reaches it as it would the one that requested
    it. Until the server has answered once, the guard alone knows how long the lease is safe.
    """
    ends_at = None if facts.limit_at is None else time.time() + facts.limit_at - boot_time()
    assignment = GPUAssignment(
        _UNKNOWN_GPU,
        "keeper",
        datetime.fromtimestamp(since),  # noqa: DTZ006 - local time, as all times of the documents
        lease_id=facts.id,
        gpu_ids=facts.gpus,
        uuids=facts.uuids,
        server_url=facts.url,
        ends_at=None if ends_at is None else datetime.fromtimestamp(ends_at),  # noqa: DTZ006 - the same
    )
    if facts.url is None:  # its keeper had decided by itself, and no server knows of it
        assignment.lost, assignment.warned = Loss(facts.ttl_s, is_local=facts.is_local), EndNotice()
        yield assignment
        return
    with environment_of(environ):
        config = ClientConfig.build(service_endpoint=facts.url)
        transport = Transport(ca_file=config.ca_file, is_named=config.is_named)
    ((endpoint_id, url),) = config.endpoints.items()
    async with transport:
        backend = ServerLeases(Endpoint(endpoint_id, url, transport, config))
        lease = HeldLease(
            facts.id, Request(Wishes(), ttl_s=facts.ttl_s), backend, (), {}, -inf, is_local=facts.is_local
        )
        assignment.lost, assignment.warned = lease.lost, lease.warned
        heartbeat = Heartbeat(backend)
        following = asyncio.create_task(_follow(lease, heartbeat))
        try:
            yield assignment
        finally:
            following.cancel()
            await asyncio.wait([following])
            heartbeat.drop(facts.id)
            await heartbeat.close()
            # Its guard is gone by then, which ends the lease of a local one as well.
            with suppress(EndpointError):
                await backend.release(facts.id)


async def _follow(lease: HeldLease, heartbeat: Heartbeat) -> None:
    """Renew it once; the heartbeat does the rest. Its server may be away for long."""
    while True:
        try:
            renewal = await lease.backend.renew([lease.id])
        except EndpointError:
            await asyncio.sleep(_ASK_AGAIN_S)
            continue
        if lease.id in renewal.renewed:
            lease.safe_since = renewal.renewed_at
            heartbeat.add(lease)
        elif (over := renewal.lost.get(lease.id)) is not None:
            lease.lost.set(over.words or over.reason, over.reason)
        return
