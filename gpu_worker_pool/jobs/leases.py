"""The lease of a command: requested, adopted from the process that requested it, and released."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from gpu_worker_pool.client.acquire.heartbeat import Heartbeat
from gpu_worker_pool.client.backends.held_lease import HeldLease
from gpu_worker_pool.client.backends.server_leases import ServerLeases
from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.client.http.transport import Transport
from gpu_worker_pool.client.pool_client import GPUWorkerPoolClient
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.errors import (
    EndpointError,
    NoEndpointAnsweredError,
    PoolError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from gpu_worker_pool.failure import TIMED_OUT, USAGE, Failure
from gpu_worker_pool.models import Assignment
from gpu_worker_pool.wire.reader import read

from .life import Usage

UNLIMITED_S: Final = 1e9
_ASK_AGAIN_S: Final = 1.0


@dataclass(frozen=True)
class GpuRequest:
    """What to ask for. `timeout_s` limits the wait; None: no limit. `is_new`: not inside the lease around this process.
    `among`: the UUIDs of the GPUs that may be granted; None: all.
    """

    gpus: int = 1
    memory_mb: float | None = None
    model: str | None = None
    priority: int = 0
    timeout_s: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    is_new: bool = False
    time_limit_s: float | None = None
    is_preemptible: bool = False
    nodes: int = 1
    among: tuple[str, ...] | None = None

    def as_request(self, ttl_s: float = DEFAULT_TTL_S) -> Request:
        """The same, as the core has it. Failure where something is not allowed."""
        try:
            wishes = Wishes(self.gpus, self.memory_mb, self.model, among=self.among, nodes=self.nodes)
            return Request(wishes, Holder(worker_id="run"), ttl_s=ttl_s, time_limit_s=self.time_limit_s)
        except ValueError as error:
            raise Failure(str(error), USAGE) from None


async def acquire(client: GPUWorkerPoolClient, request: GpuRequest, holder_pid: int) -> Assignment:
    """Wait for the GPUs. The lease belongs to the process `holder_pid`. Failure where they cannot be had."""
    try:
        return await client.request_gpu(
            UNLIMITED_S if request.timeout_s is None else request.timeout_s,
            gpus=request.gpus,
            memory_mb=request.memory_mb,
            model=request.model,
            priority=request.priority,
            labels=request.labels,
            among=request.among,
            pid=holder_pid,
            new=request.is_new,
            time_limit=request.time_limit_s,
            preemptible=request.is_preemptible,
            nodes=request.nodes,
        )
    except NoEndpointAnsweredError:
        raise
    except WorkerTimeoutError as error:
        raise Failure(f"no GPU within --timeout: {error.reason or error}", TIMED_OUT) from None
    except PoolError:
        raise
    except ValueError as error:
        raise Failure(str(error), USAGE) from None


async def release(client: GPUWorkerPoolClient, assignment: Assignment) -> None:
    """Release the lease. One that was lost needs no release, and the user has been told of the loss."""
    with suppress(StaleAssignmentError):
        await client.release_gpu(assignment)


@dataclass
class Adopted:
    """A lease that another process requested. `usage` is what was seen to be used of its GPUs, once it is released; None where
    that is not known.
    """

    assignment: Assignment
    usage: Usage | None = None
    _backend: ServerLeases | None = None

    async def is_wanted(self) -> bool:
        """Whether a waiter would be served before a new request like this one."""
        if self._backend is None or self.assignment.lease_id is None:
            return False
        try:
            return await self._backend.is_wanted(self.assignment.lease_id)
        except EndpointError:
            return False  # it is away, and can serve nobody


@asynccontextmanager
async def adopted(
    lease_id: str,
    url: str,
    request: GpuRequest,
    environ: Mapping[str, str] = os.environ,
    *,
    is_named: bool = True,
) -> AsyncIterator[Adopted]:
    """The lease that another process requested for this one's guard, with what the server at `url` says of it: kept alive,
    and released at the end. `request` is as it was requested; `environ` has the settings (the token, say). Where the server
    is not `is_named` by the user, it may be reached by a socket that is.

    A server that is away is waited for: the lease lasts as long as the guard. Failure where the lease is over, or is not
    as requested.
    """
    try:
        config = ClientConfig.build(service_endpoint=url, environ=environ)
    except ValueError as error:
        raise Failure(str(error), USAGE) from None
    ((endpoint_id, where),) = config.endpoints.items()
    async with Transport(ca_file=config.ca_file, is_named=is_named, environ=config.environ) as transport:
        backend = ServerLeases(Endpoint(endpoint_id, where, transport, config))
        lease = await _adopt(backend, lease_id, request.as_request(config.ttl_s))
        lease.names = (endpoint_id,) * len(lease.gpus)
        heartbeat = Heartbeat(backend)
        assignment = lease.assign(is_multi=False)
        if assignment.ends_at is not None and request.time_limit_s is not None:
            assignment.assigned_at = assignment.ends_at - timedelta(seconds=request.time_limit_s)
        heartbeat.add(lease)
        held = Adopted(assignment, _backend=backend)
        try:
            yield held
        finally:
            heartbeat.drop(lease_id)
            await heartbeat.close()
            if not lease.lost.is_set():
                lease.lost.settle()
                # The end of the guard releases it as well.
                with suppress(EndpointError):
                    await backend.release(lease_id)
            with suppress(EndpointError):
                reply = await backend.home.call("GET", f"/leases/{lease_id}")
                held.usage = read(Usage, reply.data)


async def _adopt(backend: ServerLeases, lease_id: str, request: Request) -> HeldLease:
    while True:
        try:
            answer = await backend.wait(lease_id, request, 0.0)
        except EndpointError:
            await asyncio.sleep(_ASK_AGAIN_S)
            continue
        if isinstance(answer, HeldLease):
            return answer
        why = getattr(answer, "words", None) or getattr(answer, "reason", None) or "it is not granted"
        raise Failure(f"the lease {lease_id} cannot be used: {why}")
