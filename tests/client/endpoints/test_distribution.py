"""How 1,000 requests are spread over unequal endpoints, in numbers, for each strategy."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from random import Random

import pytest

from gpu_worker_pool import GPUWorkerPoolClient
from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.testing import ServerProcess
from tests.client.statistics_server import StatisticsServer, until
from tests.server.leasing import wait_until_free

REQUESTS = 1000
SIZES = (8, 4, 2, 1)
NEVER_S = 3600.0


@asynccontextmanager
async def a_client(
    strategy: str, sizes: tuple[int, ...] = SIZES
) -> AsyncIterator[tuple[GPUWorkerPoolClient, dict[str, int]]]:
    """A client of servers of these sizes, and how many GPUs there are behind each endpoint id."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(StatisticsServer(size)) for size in sizes]
        client = GPUWorkerPoolClient(
            service_endpoints=[server.url for server in servers],
            load_balancing_strategy=strategy,
            polling_interval=NEVER_S,
        )
        async with client:
            await all_are_up(client)
            yield client, {f"127.0.0.1-{server.port}": len(server.gpus) for server in servers}


async def all_are_up(client: GPUWorkerPoolClient) -> None:
    """A starved machine may answer later than a start waits for."""
    await until(lambda: client.get_error_recovery_status()["degraded_endpoints"] == [], "all are up")


async def spread(client: GPUWorkerPoolClient, held_at_once: int, requests: int = REQUESTS) -> Counter[str]:
    """How many of the requests each endpoint served, with that many GPUs held all the time, the oldest given back."""
    served: Counter[str] = Counter()
    held: deque[Assignment] = deque()
    for _ in range(requests):
        assignment = await client.request_gpu(timeout=30)
        served[str(assignment.endpoint_id)] += 1
        held.append(assignment)
        if len(held) > held_at_once:
            await client.release_gpu(held.popleft())
    return served


@pytest.mark.parametrize("held_at_once", [0, 3], ids=["given back at once", "some are held"])
async def test_round_robin_is_even(held_at_once: int) -> None:
    async with a_client("round_robin") as (client, sizes):
        served = await spread(client, held_at_once)
        assert served.keys() == sizes.keys()
        assert max(served.values()) - min(served.values()) <= 1, served


@pytest.mark.parametrize("held_at_once", [0, 5], ids=["given back at once", "some are held"])
async def test_weighted_is_in_proportion_to_the_number_of_gpus(held_at_once: int) -> None:
    async with a_client("weighted") as (client, sizes):
        served = await spread(client, held_at_once)
        for endpoint_id, size in sizes.items():
            share = REQUESTS * size / sum(SIZES)
            assert abs(served[endpoint_id] - share) <= 0.03 * share, served


async def test_availability_takes_the_endpoint_with_the_highest_percentage_each_time() -> None:
    random = Random(5)
    async with a_client("availability") as (client, sizes):
        held: list[Assignment] = []
        used: Counter[str] = Counter()
        served: Counter[str] = Counter()
        for _ in range(REQUESTS):
            while held and (len(held) == sum(SIZES) or random.random() < 0.5):
                released = held.pop(random.randrange(len(held)))
                used[str(released.endpoint_id)] -= 1
                await client.release_gpu(released)
            available = {id_: (size - used[id_]) / size for id_, size in sizes.items()}

            assignment = await client.request_gpu(timeout=30)

            chosen = str(assignment.endpoint_id)
            assert available[chosen] == max(available.values()), (chosen, available)
            held.append(assignment)
            used[chosen] += 1
            served[chosen] += 1
        assert served.keys() == sizes.keys()


async def test_availability_takes_more_gpus_where_the_percentage_is_equal() -> None:
    """Given back at once, all endpoints are always free to 100 %: then the count decides."""
    async with a_client("availability") as (client, sizes):
        assert await spread(client, 0) == {max(sizes, key=sizes.__getitem__): REQUESTS}


async def test_availability_fills_unequal_endpoints_alike() -> None:
    async with a_client("availability") as (client, sizes):
        served = await spread(client, sum(SIZES), requests=sum(SIZES))
        assert served == sizes


@pytest.mark.parametrize("strategy", ["availability", "round_robin", "weighted"])
async def test_availability_and_turns_are_even_over_equal_endpoints(strategy: str) -> None:
    async with a_client(strategy, sizes=(3, 3, 3)) as (client, _):
        served = await spread(client, 0, requests=300)
        assert max(served.values()) - min(served.values()) <= 1, served


@pytest.mark.parametrize("strategy", ["availability", "round_robin", "weighted"])
async def test_a_full_endpoint_is_passed_over_whatever_its_turn(strategy: str) -> None:
    """15 GPUs, 14 of them held for good: the last one serves everybody."""
    async with a_client(strategy) as (client, _):
        held = [await client.request_gpu(timeout=30) for _ in range(sum(SIZES))]
        free = held.pop(7)
        await client.release_gpu(free)
        assert await spread(client, 0, requests=100) == {str(free.endpoint_id): 100}


async def test_the_metrics_count_the_same() -> None:
    async with a_client("weighted") as (client, _):
        served = await spread(client, 0, requests=100)
        balancer = client.get_detailed_metrics()["load_balancer"]
        assert balancer["requests_by_endpoint"] == served
        assert (balancer["strategy_name"], balancer["total_requests"], balancer["success_rate"]) == (
            "weighted",
            100,
            100.0,
        )


# --- the same with leases --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lease_servers() -> Iterator[list[ServerProcess]]:
    env = {"REFRESH_INTERVAL": "0.05", "GPU_POOL_DURABILITY": "normal"}
    with ExitStack() as stack:
        yield [stack.enter_context(ServerProcess({**env, "SIMULATED_GPUS": size})) for size in map(str, SIZES)]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("round_robin", (30, 30, 30, 30)), ("weighted", (64, 32, 16, 8)), ("availability", (120, 0, 0, 0))],
)
async def test_with_lease_servers(lease_servers: list[ServerProcess], strategy: str, expected: tuple[int, ...]) -> None:
    """In round robin and by weight each server has its turn, also when its GPU was given back a moment ago."""
    client = GPUWorkerPoolClient(
        service_endpoints=[server.url for server in lease_servers],
        load_balancing_strategy=strategy,
        polling_interval=NEVER_S,
    )
    async with client:
        await all_are_up(client)
        served = await spread(client, 0, requests=120)
    for server, number in zip(lease_servers, expected, strict=True):
        assert abs(served[f"127.0.0.1-{server.port}"] - number) <= 1, served
        wait_until_free(server)
