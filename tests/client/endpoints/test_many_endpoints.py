"""A hundred endpoints, some of them dead: nobody waits for those."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from gpu_worker_pool import GPUWorkerPoolClient, MultiEndpointPoolStatus
from tests.client.statistics_server import StatisticsServer, until
from tests.server.running import free_port

LIVE, REFUSING, HANGING = 85, 10, 5


@dataclass(frozen=True)
class Hundred:
    live: list[StatisticsServer]
    refusing: list[StatisticsServer]
    hanging: list[StatisticsServer]

    @property
    def urls(self) -> list[str]:
        """The dead ones first, where a client that goes through them one by one would be held up."""
        return [server.url for server in (*self.hanging, *self.refusing, *self.live)]


def endpoint_id(server: StatisticsServer) -> str:
    return f"127.0.0.1-{server.port}"


@pytest.fixture
async def hundred() -> AsyncIterator[Hundred]:
    async with AsyncExitStack() as stack:
        live = [await stack.enter_async_context(StatisticsServer(1)) for _ in range(LIVE)]
        hanging = [await stack.enter_async_context(StatisticsServer(1, hangs=True)) for _ in range(HANGING)]
        refusing = [await stack.enter_async_context(StatisticsServer(1)) for _ in range(REFUSING)]
        for server in refusing:
            await server.stop()
        yield Hundred(live, refusing, hanging)


@pytest.mark.parametrize("strategy", ["availability", "round_robin", "weighted"])
async def test_a_start_and_a_request_wait_for_none_of_the_dead(hundred: Hundred, strategy: str) -> None:
    client = GPUWorkerPoolClient(
        service_endpoints=hundred.urls, load_balancing_strategy=strategy, endpoint_timeout=60, request_timeout=60
    )
    async with client:
        assignment = await client.request_gpu(timeout=30)

        # Those that hang were asked, and their answers are still to come.
        assert [server.calls for server in hundred.hanging] == [["GET /pool?queue=100&leases=1000"]] * HANGING
        assert assignment.endpoint_id in {endpoint_id(server) for server in hundred.live}
        dead = {endpoint_id(server) for server in (*hundred.hanging, *hundred.refusing)}
        await until(
            lambda: len(client.get_error_recovery_status()["healthy_endpoints"]) == LIVE, "all live ones are up"
        )
        assert set(client.get_error_recovery_status()["degraded_endpoints"]) == dead


async def test_all_gpus_of_the_live_ones_can_be_had(hundred: Hundred) -> None:
    async with GPUWorkerPoolClient(service_endpoints=hundred.urls, endpoint_timeout=60, request_timeout=60) as client:
        await until(lambda: client.get_pool_status().total_gpus == LIVE, "all live ones are up")
        got = await asyncio.gather(*(client.request_gpu(timeout=30) for _ in range(LIVE)))
        assert {assignment.endpoint_id for assignment in got} == {endpoint_id(server) for server in hundred.live}
        status = client.get_pool_status()
        assert isinstance(status, MultiEndpointPoolStatus)
        assert (status.total_endpoints, status.healthy_endpoints, status.available_gpus) == (100, LIVE, 0)
        # One more waits, until one of the dead ones comes back to life.
        waiting = asyncio.create_task(client.request_gpu(timeout=30))
        await until(lambda: client.get_pool_status().blocked_workers == 1, "it waits")
        back = hundred.refusing[3]
        await back.start()
        assert await client.trigger_endpoint_recovery(endpoint_id(back))
        assert (await waiting).endpoint_id == endpoint_id(back)


async def test_a_stop_waits_for_none_of_the_dead_either(hundred: Hundred) -> None:
    client = GPUWorkerPoolClient(service_endpoints=hundred.urls, endpoint_timeout=60, request_timeout=60)
    await client.start()
    await client.request_gpu(timeout=30)
    before = {task for task in asyncio.all_tasks() if task.get_name().startswith("gpu-")}
    assert before

    await client.stop()

    assert [server.calls for server in hundred.hanging] == [["GET /pool?queue=100&leases=1000"]] * HANGING
    assert [task for task in before if not task.done()] == []


async def test_endpoints_that_do_not_answer_at_the_start_are_named_in_words(caplog: pytest.LogCaptureFixture) -> None:
    async with GPUWorkerPoolClient(f"http://127.0.0.1:{free_port()}"):
        pass
    (said,) = [record.getMessage() for record in caplog.records if "no endpoint answers yet" in record.getMessage()]
    assert said.startswith("no endpoint answers yet: 127.0.0.1: cannot connect")
    assert "{" not in said
