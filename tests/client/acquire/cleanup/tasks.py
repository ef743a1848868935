"""Requests that wait."""

from __future__ import annotations

import asyncio
from typing import Any

from gpu_worker_pool import GPUWorkerPoolClient
from gpu_worker_pool.testing import ServerProcess
from tests.client.fault_tools import lease_ids, soon


async def waiting(client: GPUWorkerPoolClient, *servers: ServerProcess) -> asyncio.Task[Any]:
    """A request that is in the queue of each of these servers."""
    before = lease_ids(*servers)
    task = asyncio.create_task(client.request_gpu(timeout=20))
    await soon(lambda: all(lease_ids(server) - before for server in servers), "it waits at all of them")
    return task
