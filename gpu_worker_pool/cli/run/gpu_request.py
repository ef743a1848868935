"""The request for a command's GPUs, from the queue to the release."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpu_worker_pool.cli.failure import TIMED_OUT, USAGE, Failure
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.errors import NoEndpointAnsweredError, PoolError, StaleAssignmentError, WorkerTimeoutError

from .sources import Sources

_UNLIMITED_S = 1e9


@dataclass(frozen=True)
class GpuRequest:
    """What to ask for. `timeout_s` limits the wait; None: no limit. `is_new`: not inside the lease around this process."""

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


def core_request(request: GpuRequest) -> Request:
    """The same, as the core has it. Failure where something is not allowed."""
    try:
        wishes = Wishes(request.gpus, request.memory_mb, request.model, nodes=request.nodes)
        return Request(wishes, Holder(worker_id="run"), time_limit_s=request.time_limit_s)
    except ValueError as error:
        raise Failure(str(error), USAGE) from None


async def acquire(client: GPUWorkerPoolClient, sources: Sources, request: GpuRequest, holder_pid: int) -> Assignment:
    """Wait for the GPUs. The lease belongs to the process `holder_pid`. Failure where they cannot be had."""
    try:
        return await client.request_gpu(
            _UNLIMITED_S if request.timeout_s is None else request.timeout_s,
            gpus=request.gpus,
            memory_mb=request.memory_mb,
            model=request.model,
            priority=request.priority,
            labels=request.labels,
            among=sources.among,
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
    with contextlib.suppress(StaleAssignmentError):
        await client.release_gpu(assignment)
