"""Requests that are served by other servers than the one in a bad way, and a server that is not there."""

from __future__ import annotations

import time
from typing import Any

from gpu_worker_pool import GPUWorkerPoolClient
from tests.client.fault_tools import id_of
from tests.server.running import free_port

# Far less than what it would take to wait for a server that does not answer, and enough on a busy machine.
QUICKLY_S = 8.0


async def served_elsewhere(client: GPUWorkerPoolClient, bad: Any, number: int = 4) -> None:
    """A number of requests one after the other, each quickly, none of them there."""
    assignments = []
    for _ in range(number):
        began = time.monotonic()
        assignment = await client.request_gpu(timeout=30)
        assert time.monotonic() - began < QUICKLY_S
        assert assignment.endpoint_id != id_of(bad)
        assignments.append(assignment)
    assert len({assignment.global_gpu_id for assignment in assignments}) == number
    for assignment in assignments:
        await client.release_gpu(assignment)


class Nobody:
    """A place where nothing listens."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
