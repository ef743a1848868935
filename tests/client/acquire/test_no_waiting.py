"""A request that does not want to wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_worker_pool import GPUWorkerPoolClient, WorkerTimeoutError
from gpu_worker_pool.testing import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "1"}) as running:
        yield running


async def test_a_timeout_of_zero_takes_what_is_free_and_waits_for_nothing(server: ServerProcess) -> None:
    async with GPUWorkerPoolClient(server.url) as client:
        held = await client.request_gpu(timeout=0)
        with pytest.raises(WorkerTimeoutError, match="leased by"):
            await client.request_gpu(timeout=0)
        assert [lease["id"] for lease in server.json("/leases")["leases"]] == [held.lease_id]


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
async def test_a_timeout_that_makes_no_sense_is_refused(server: ServerProcess, seconds: float) -> None:
    async with GPUWorkerPoolClient(server.url) as client:
        with pytest.raises(ValueError, match="timeout is"):
            await client.request_gpu(timeout=seconds)
