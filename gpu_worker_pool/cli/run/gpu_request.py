"""See jobs/leases.py; for `batch` and `submit` as they are."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker_pool.client.pool_client import GPUWorkerPoolClient
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.jobs import leases
from gpu_worker_pool.jobs.leases import GpuRequest, release
from gpu_worker_pool.models import Assignment

from .sources import Sources

__all__ = ["GpuRequest", "acquire", "core_request", "release"]


def core_request(request: GpuRequest) -> Request:
    return request.as_request()


async def acquire(client: GPUWorkerPoolClient, sources: Sources, request: GpuRequest, holder_pid: int) -> Assignment:
    return await leases.acquire(client, replace(request, among=sources.among), holder_pid)
