"""Which GPUs are given: below the thresholds, known, free, and as asked for; where the server has statistics only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool import (
    GPUWorkerPoolClient,
    MultiEndpointPoolStatus,
    ServiceUnavailableError,
    WorkerTimeoutError,
)
from gpu_worker_pool.testing import ServerProcess
from tests.client.statistics_server import StatisticsServer, until
from tests.server.leasing import held, release_all

# No test here lasts that long, so what happens is not because of a poll.
NEVER_S = 3600.0
OFTEN_S = 0.05


async def test_it_is_said_once_that_only_this_process_is_coordinated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpu_worker_pool")
    async with (
        StatisticsServer(1) as server,
        GPUWorkerPoolClient(server.url, polling_interval=OFTEN_S, endpoint_max_retries=0) as client,
    ):
        for _ in range(2):
            await client.release_gpu(await client.request_gpu())
            client.get_pool_status()
            await server.wait_for_polls(2)
        await server.stop()
        await until(lambda: not client.get_error_recovery_status()["healthy_endpoints"], "it is seen to be down")
        await server.start()
        await until(lambda: bool(client.get_error_recovery_status()["healthy_endpoints"]), "it is back")

    said = [record for record in caplog.records if "statistics only" in record.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING
    assert said[0].__dict__["endpoint"] == "127.0.0.1"


def gpu(index: int, memory: float | None, utilization: float | None) -> dict[str, Any]:
    return {
        "gpu_id": index,
        "name": "NVIDIA A100",
        "memory_usage_percent": memory,
        "utilization_percent": utilization,
    }


@pytest.mark.parametrize(
    ("memory", "utilization"),
    [(80.1, 0), (0, 90.1), (100, 100), (None, 0), (0, None), (None, None)],
)
async def test_a_gpu_that_is_busy_or_unknown_is_not_given(memory: float | None, utilization: float | None) -> None:
    async with (
        StatisticsServer([gpu(0, memory, utilization), gpu(1, 79.0, 89.0)]) as server,
        GPUWorkerPoolClient(server.url, polling_interval=NEVER_S) as client,
    ):
        assert client.get_pool_status().available_gpus == 1
        assert (await client.request_gpu()).gpu_id == 1
        with pytest.raises(WorkerTimeoutError):
            await client.request_gpu(timeout=0.05)


async def test_the_users_thresholds_count() -> None:
    async with (
        StatisticsServer([gpu(0, 60, 10), gpu(1, 10, 60), gpu(2, 10, 10)]) as server,
        GPUWorkerPoolClient(
            server.url, memory_threshold=50, utilization_threshold=50, polling_interval=NEVER_S
        ) as strict,
        GPUWorkerPoolClient(
            server.url, memory_threshold=70, utilization_threshold=70, polling_interval=NEVER_S
        ) as generous,
    ):
        assert strict.get_pool_status().available_gpus == 1
        only = await strict.request_gpu()
        assert only.gpu_id == 2
        await strict.release_gpu(only)
        assert {(await generous.request_gpu()).gpu_id for _ in range(3)} == {0, 1, 2}


async def test_a_server_that_dies_grants_no_more_and_what_is_held_stays() -> None:
    async with (
        StatisticsServer(2) as server,
        GPUWorkerPoolClient(server.url, polling_interval=OFTEN_S, endpoint_max_retries=0) as client,
    ):
        mine = await client.request_gpu()
        await server.stop()
        await until(lambda: not client.get_error_recovery_status()["healthy_endpoints"], "it is seen to be down")
        with pytest.raises(ServiceUnavailableError) as raised:
            await client.request_gpu(timeout=0.2)
        assert "127.0.0.1" in str(raised.value)
        assert isinstance(raised.value, WorkerTimeoutError)
        assert not mine.is_lost

        await server.start()

        other = await client.request_gpu(timeout=30)
        assert other.gpu_id != mine.gpu_id
        await client.release_gpu(mine)
        assert (await client.request_gpu(timeout=30)).gpu_id == mine.gpu_id


async def test_a_request_with_an_amount_of_memory_shares_a_gpu() -> None:
    async with (
        StatisticsServer(1) as server,
        GPUWorkerPoolClient(server.url, polling_interval=NEVER_S) as client,
    ):
        assert {(await client.request_gpu(memory_mb=30_000)).gpu_id for _ in range(2)} == {0}
        with pytest.raises(WorkerTimeoutError):
            await client.request_gpu(timeout=0.05, memory_mb=30_000)


# --- a fleet of both kinds -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lease_server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "1", "REFRESH_INTERVAL": "0.05", "GPU_POOL_DURABILITY": "normal"}) as server:
        yield server


@pytest.fixture
def leases(lease_server: ServerProcess) -> Iterator[ServerProcess]:
    yield lease_server
    release_all(lease_server)


async def test_a_mixed_fleet_gives_the_gpus_of_both(leases: ServerProcess) -> None:
    async with StatisticsServer(2) as statistics:
        urls = [leases.url, statistics.url]
        async with GPUWorkerPoolClient(service_endpoints=urls, polling_interval=NEVER_S) as client:
            got = [await client.request_gpu(timeout=30) for _ in range(3)]
            status = client.get_pool_status()
            assert len({assignment.gpu_id for assignment in got}) == 3
            assert isinstance(status, MultiEndpointPoolStatus)
            assert (status.total_gpus, status.available_gpus, status.active_workers) == (3, 0, 3)
            assert {info["endpoint_id"]: info["has_leases"] for info in status.endpoint_details} == {
                f"127.0.0.1-{leases.port}": True,
                f"127.0.0.1-{statistics.port}": False,
            }
            assert held(leases) == {a.lease_id for a in got if a.endpoint_id == f"127.0.0.1-{leases.port}"}
        assert [lease for lease in leases.json("/pool")["leases"] if lease["state"] == "active"] == []
