"""What the client tells: status, metrics, recovery, errors, events and logs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime

import pytest

from gpu_worker_pool import (
    ClientEvent,
    GPUAssignment,
    GPUWorkerPoolClient,
    MultiEndpointPoolStatus,
    PoolStatus,
    RequestRefusedError,
    WorkerTimeoutError,
)
from gpu_worker_pool.testing import ServerProcess
from tests.client.api.two_servers import BOTH, ENV, NEVER_S, active
from tests.client.statistics_server import StatisticsServer, until
from tests.server.leasing import put, wait_until_free

# --- status ----------------------------------------------------------------------------------------------------------


async def test_the_status_has_own_changes_at_once(big: ServerProcess) -> None:
    async with GPUWorkerPoolClient(big.url, polling_interval=NEVER_S) as client:
        status = client.get_pool_status()
        assert type(status) is PoolStatus
        assert status == PoolStatus(3, 3, 0, 0, {})
        assignment = await client.request_gpu()
        status = client.get_pool_status()
        assert (status.available_gpus, status.active_workers) == (2, 1)
        ((gpu_id, (worker,)),) = status.gpu_assignments.items()
        assert (gpu_id, worker.worker_id) == (assignment.gpu_id, assignment.worker_id)
        await client.release_gpu(assignment)
        assert client.get_pool_status() == PoolStatus(3, 3, 0, 0, {})


async def test_the_status_shows_the_whole_pool_with_what_others_have(big: ServerProcess) -> None:
    async with (
        GPUWorkerPoolClient(big.url, polling_interval=0.05) as client,
        GPUWorkerPoolClient(big.url, polling_interval=0.05) as other,
    ):
        theirs = [await other.request_gpu() for _ in range(2)]
        await until(lambda: client.get_pool_status().available_gpus == 1, "the other's are seen")
        mine = await client.request_gpu()
        blocked = asyncio.create_task(other.request_gpu(timeout=30))
        await until(lambda: client.get_pool_status().blocked_workers == 1, "the other's waiting is seen")
        status = client.get_pool_status()
        assert (status.total_gpus, status.available_gpus, status.blocked_workers) == (3, 0, 1)
        assert status.gpu_assignments.keys() == {mine.gpu_id, *(assignment.gpu_id for assignment in theirs)}
        await client.release_gpu(mine)
        await blocked
        await until(lambda: client.get_pool_status().blocked_workers == 0, "nobody waits")


@pytest.mark.usefixtures("names")
async def test_the_status_of_several_endpoints(big: ServerProcess, small: ServerProcess) -> None:
    put(big, "of-somebody-else", worker_id="somebody")
    async with GPUWorkerPoolClient(service_endpoints=BOTH, polling_interval=NEVER_S) as client:
        await client.refresh()
        status = client.get_pool_status()
        assert isinstance(status, MultiEndpointPoolStatus)
        assert (status.total_endpoints, status.healthy_endpoints) == (2, 2)
        assert (status.total_gpus, status.available_gpus, status.active_workers) == (5, 4, 1)
        ((gpu_id, (worker,)),) = status.gpu_assignments.items()
        assert str(gpu_id).startswith("big.localhost:")
        assert worker.worker_id == "somebody"
        infos = client.get_endpoints_info()
        assert infos is not None
        assert [info["endpoint_id"] for info in infos] == ["big.localhost", "small.localhost"]
        assert status.endpoint_details == infos
        for endpoint, info in zip(status.endpoints, infos, strict=True):
            assert dataclasses.asdict(endpoint).items() <= info.items()
        assert [(info["available_gpus"], info["total_gpus"], info["is_healthy"]) for info in infos] == [
            (2, 3, True),
            (2, 2, True),
        ]
        assert all(info["response_time_ms"] > 0 and isinstance(info["last_seen"], datetime) for info in infos)


# --- metrics and recovery --------------------------------------------------------------------------------------------


async def test_the_metrics(big: ServerProcess) -> None:
    async with GPUWorkerPoolClient(big.url, memory_threshold=70.0, polling_interval=NEVER_S) as client:
        assignment = await client.request_gpu()
        with pytest.raises(RequestRefusedError):
            await client.request_gpu(gpus=9)
        metrics = client.get_detailed_metrics()
        assert metrics["total_gpus"] == 3
        assert metrics["available_gpus"] == 2
        assert metrics["active_workers"] == 1
        assert metrics["blocked_workers"] == 0
        assert metrics["thresholds"] == {"memory_threshold_percent": 70.0, "utilization_threshold_percent": 90.0}
        assert metrics["assignments"] == {str(assignment.gpu_id): [assignment.worker_id]}
        assert metrics["pool_summary"]["efficiency_percent"] == 33.33
        details = metrics["endpoints"]["details"]["127.0.0.1"]
        assert (details["available_gpus"], details["total_gpus"], details["is_healthy"]) == (2, 3, True)
        assert details["avg_response_time_ms"] > 0
        balancer = metrics["load_balancer"]
        assert (balancer["strategy_name"], balancer["total_requests"]) == ("availability", 2)
        assert (balancer["successful_requests"], balancer["failed_requests"], balancer["success_rate"]) == (1, 1, 50.0)
        gpu = metrics["gpu_metrics"][assignment.local_gpu_id or 0]
        assert (gpu["gpu_id"], gpu["is_available"], gpu["assigned_workers"]) == (assignment.gpu_id, False, 1)
        assert gpu["name"].endswith("A100-SXM4-80GB") or gpu["name"].endswith("T4")


async def test_recovery_is_told_and_can_be_triggered(big: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    async with StatisticsServer(2) as late:
        await late.stop()
        urls = [big.url, late.url]
        big_id, late_id = (f"127.0.0.1-{port}" for port in (big.port, late.port))
        async with GPUWorkerPoolClient(service_endpoints=urls, polling_interval=NEVER_S) as client:
            status = client.get_error_recovery_status()
            assert status["healthy_endpoints"] == status["degradation_manager"]["healthy_endpoints"] == [big_id]
            assert status["degraded_endpoints"] == status["degradation_manager"]["degraded_endpoints"] == [late_id]
            assert status["degradation_manager"]["is_fully_degraded"] is False
            assert status["endpoint_health_summary"]["healthy_count"] == 1
            assert status["circuit_breaker_stats"][big_id]["state"] == "closed"
            assert status["circuit_breaker_stats"][late_id]["failure_rate"] == 100.0
            client.print_error_recovery_summary()
            printed = capsys.readouterr().out.splitlines()
            assert printed[0] == "=== Error Recovery Status ==="
            assert printed[1] == "Degradation Status: Partial (1/2 endpoints healthy)"
            assert len(printed) == 4
            assert late_id in printed[3]
            assert "degraded" in printed[3]
            assert not await client.trigger_endpoint_recovery(late_id)
            assert not await client.trigger_endpoint_recovery("unknown")

            await late.start()

            assert await client.trigger_endpoint_recovery(late_id)
            assert client.get_error_recovery_status()["degraded_endpoints"] == []
            assert client.get_pool_status().total_gpus == 5


# --- wrong use -------------------------------------------------------------------------------------------------------


async def test_before_the_start_and_after_the_end_it_says_so(big: ServerProcess) -> None:
    client = GPUWorkerPoolClient(service_endpoints=big.url)
    assignment = GPUAssignment(0, "worker", datetime.now())  # noqa: DTZ005

    async def all_refuse() -> None:
        calls: list[Callable[[], Awaitable[object]]] = [
            client.request_gpu,
            lambda: client.release_gpu(assignment),
            lambda: client.trigger_endpoint_recovery("127.0.0.1"),
            lambda: client.queue_request_for_retry(client.request_gpu),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="not started"):
                await call()
        for ask in (
            client.get_pool_status,
            client.get_detailed_metrics,
            client.get_error_recovery_status,
            client.print_error_recovery_summary,
        ):
            with pytest.raises(RuntimeError, match="not started"):
                ask()
        assert client.get_endpoints_info() is None
        assert client.is_multi_endpoint_mode()

    await all_refuse()
    async with client:
        with pytest.raises(RuntimeError, match="already started"):
            await client.start()
    await all_refuse()


async def test_a_foreign_assignment_and_one_given_back_are_refused(big: ServerProcess) -> None:
    async with GPUWorkerPoolClient(big.url) as client, GPUWorkerPoolClient(big.url) as other:
        mine, theirs = await client.request_gpu(), await other.request_gpu()
        invented = GPUAssignment(mine.local_gpu_id or 0, mine.worker_id, mine.assigned_at)
        for wrong in (theirs, invented):
            with pytest.raises(ValueError, match="not an assignment of this client"):
                await client.release_gpu(wrong)
        for nothing in (None, 0, "worker"):
            with pytest.raises(ValueError, match="not an assignment of this client"):
                await client.release_gpu(nothing)  # type: ignore[arg-type]
        await client.release_gpu(mine)
        with pytest.raises(ValueError, match="released before"):
            await client.release_gpu(mine)
        assert [lease["id"] for lease in active(big)] == [theirs.lease_id]


# --- events and logs -------------------------------------------------------------------------------------------------


async def test_a_hook_hears_of_everything(big: ServerProcess) -> None:
    heard: list[ClientEvent] = []
    async with GPUWorkerPoolClient(big.url, on_event=heard.append) as client:
        assignment = await client.request_gpu()
        await client.release_gpu(assignment)
        with pytest.raises(RequestRefusedError):
            await client.request_gpu(gpus=9)
        wait_until_free(big)
        await client.request_gpu(gpus=3)
        with pytest.raises(WorkerTimeoutError):
            await client.request_gpu(timeout=1.0)
    kinds = [event.kind for event in heard]
    assert kinds == [
        "requested",
        "assigned",
        "released",
        "requested",
        "failed",
        "requested",
        "assigned",
        "requested",
        "waiting",
        "timed_out",
        "released",
    ]
    assigned = heard[1]
    assert assigned == ClientEvent(
        "assigned", assignment.worker_id, str(assignment.lease_id), "127.0.0.1", assignment.gpu_id
    )
    assert {event.lease_id for event in heard[:3]} == {assignment.lease_id}
    with pytest.raises(dataclasses.FrozenInstanceError):
        assigned.kind = "lost"  # type: ignore[misc]


async def test_every_log_record_about_a_lease_or_an_endpoint_has_it_as_a_field(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also what goes wrong: a server that dies with a lease of ours on it."""
    caplog.set_level(logging.DEBUG, "gpu_worker_pool")
    with ServerProcess({**ENV, "SIMULATED_GPUS": "1"}) as server:
        async with GPUWorkerPoolClient(server.url, polling_interval=NEVER_S, endpoint_max_retries=0) as client:
            assignment = await client.request_gpu()
            server.kill()
            await client.release_gpu(assignment)
            with pytest.raises(WorkerTimeoutError):
                await client.request_gpu(timeout=0.1)

    records = [record for record in caplog.records if record.name.startswith("gpu_worker_pool")]
    assert any("could not be released" in record.getMessage() for record in records)
    for record in records:
        message, fields = record.getMessage(), record.__dict__
        if str(assignment.lease_id) in message:
            assert fields.get("lease_id") == assignment.lease_id, message
            assert fields.get("endpoint") == "127.0.0.1", message
        if "endpoint 127.0.0.1" in message:
            assert fields.get("endpoint") == "127.0.0.1", message
