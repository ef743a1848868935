"""Waiting for GPUs; and a lease that another process requested: adopted, kept alive, and released."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from time import monotonic
from typing import Final

from gpu_worker_pool.client.acquire.acquisition import ONE_TRY_S
from gpu_worker_pool.client.acquire.heartbeat import Heartbeat
from gpu_worker_pool.client.asking import make_request
from gpu_worker_pool.client.backends.lease_backend import HeldLease
from gpu_worker_pool.client.backends.server_leases import ServerLeases
from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.client.http.transport import Transport
from gpu_worker_pool.client.local_client import UNLIMITED_S, LocalClient, NoServerAnswersError
from gpu_worker_pool.client.options import RequestWishes
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.errors import EndpointError, NoEndpointAnsweredError, WorkerTimeoutError
from gpu_worker_pool.failure import TIMED_OUT, USAGE, Failure
from gpu_worker_pool.models import Assignment
from gpu_worker_pool.wire.reader import read

from .submission import Usage

_ASK_AGAIN_S: Final = 1.0
# How long a server may be away that has just granted a lease. The keeper requests another one then.
_MOST_SILENT_S: Final = 60.0


@contextmanager
def in_time() -> Iterator[None]:
    """Raise a Failure with TIMED_OUT where a request had to wait for too long."""
    try:
        yield
    except NoEndpointAnsweredError:
        raise
    except WorkerTimeoutError as error:
        raise Failure(f"no GPU within --timeout: {error.reason or error}", TIMED_OUT) from None


async def acquire(
    client: LocalClient,
    wishes: RequestWishes,
    timeout_s: float | None,
    worker_id: str | None = None,
    *,
    waits_for_server: bool = False,
) -> Assignment:
    """Wait for GPUs, at most for `timeout_s`; Failure with TIMED_OUT then. Also for a server that does not answer yet, where it
    `waits_for_server`; otherwise that is a PoolError.
    """
    began, most_s = monotonic(), UNLIMITED_S if timeout_s is None else timeout_s
    # A server may take its time for each answer. A request that must not wait still asks once.
    limit = asyncio.timeout(max(most_s, ONE_TRY_S))
    try:
        async with limit:
            await client.start(most_s if waits_for_server else 0.0)
        with in_time():
            return await client.request(max(most_s - (monotonic() - began), 0.0), wishes, worker_id)
    except (NoServerAnswersError, NoEndpointAnsweredError) as error:
        if not waits_for_server or getattr(error, "is_final", False):
            raise
    except TimeoutError:
        if not limit.expired():
            raise
    raise Failure("no GPU within --timeout: no server has answered in that time", TIMED_OUT)


@dataclass
class Adopted:
    """A lease that another process requested. `usage` is what was seen to be used of its GPUs, once it is released; None where
    that is not known.
    """

    assignment: Assignment
    usage: Usage | None = None
    # How its last command ended, for the server.
    end_note: str | None = None
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
    wishes: RequestWishes,
    environ: Mapping[str, str] = os.environ,
    *,
    is_named: bool = True,
    within_s: float = _MOST_SILENT_S,
) -> AsyncIterator[Adopted]:
    """The lease that another process requested for this one's guard, with what the server at `url` says of it: kept alive,
    and released at the end. `wishes` are as it was requested; `environ` has the settings (the token, say). Where the server
    is not `is_named` by the user, it may be reached by a socket that is.

    A server that is away is waited for, but not for ever: `within_s`. Failure where the lease is over, or is not as requested.
    """
    try:
        config = ClientConfig.build(service_endpoint=url, environ=environ)
    except ValueError as error:
        raise Failure(str(error), USAGE) from None
    ((endpoint_id, where),) = config.endpoints.items()
    request = make_request(config, "supervisor", wishes)
    async with Transport.of(replace(config, is_named=is_named)) as transport:
        backend = ServerLeases(Endpoint(endpoint_id, where, transport, config))
        lease = await _adopt(backend, lease_id, request, within_s)
        heartbeat = Heartbeat(backend)
        assignment = lease.assignment
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
                    await backend.release(lease_id, held.end_note)
            with suppress(EndpointError):
                reply = await backend.home.call("GET", f"/leases/{lease_id}")
                held.usage = read(Usage, reply.data)


async def _adopt(backend: ServerLeases, lease_id: str, request: Request, within_s: float) -> HeldLease:
    give_up_at = monotonic() + within_s
    while True:
        try:
            answer = await backend.wait(lease_id, request, 0.0)
        except EndpointError as error:
            if monotonic() + _ASK_AGAIN_S > give_up_at:
                raise Failure(f"the lease {lease_id} cannot be used: {error}") from None
            await asyncio.sleep(_ASK_AGAIN_S)
            continue
        if isinstance(answer, HeldLease):
            return answer
        why = getattr(answer, "words", None) or getattr(answer, "reason", None) or "it is not granted"
        raise Failure(f"the lease {lease_id} cannot be used: {why}")
