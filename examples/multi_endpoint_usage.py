"""One client, several GPU servers: everything that is different from one server.

python examples/multi_endpoint_usage.py                     # with two servers of its own, on simulated GPUs
python examples/multi_endpoint_usage.py --endpoint http://gpu-1:8000,http://gpu-2:8000      # with yours
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from example_servers import example_pool, title

from gpu_worker_pool import (
    GlobalGPUAssignment,
    GPUContextManager,
    GPUWorkerPoolClient,
    MultiEndpointPoolStatus,
    PoolError,
)
from gpu_worker_pool.testing import ServerProcess

SOON_S = 20.0


async def global_ids(client: GPUWorkerPoolClient) -> None:
    """Show global ids: with several servers an id names the server too."""
    title("Global ids")
    assignment = await client.request_gpu(timeout=30)
    assert isinstance(assignment, GlobalGPUAssignment)
    print(f"  {assignment.global_gpu_id} is GPU {assignment.local_gpu_id} of {assignment.endpoint_id}")
    await client.release_gpu(assignment)
    async with GPUContextManager(client, timeout=30) as gpu_id:
        print(f"  a context yields the same kind of id: {gpu_id}")


async def strategies(urls: Sequence[str]) -> None:
    """Show which server is asked first. A request that it cannot serve goes on to the next."""
    title("Strategies: where six requests, one after the other, are served")
    for strategy in ("availability", "round_robin", "weighted"):
        served: Counter[str] = Counter()
        async with GPUWorkerPoolClient(service_endpoints=list(urls), load_balancing_strategy=strategy) as client:
            for _ in range(6):
                assignment = await client.request_gpu(timeout=30)
                served[str(assignment.endpoint_id)] += 1
                await client.release_gpu(assignment)
        print(f"  {strategy:<13}{', '.join(f'{count} by {id_}' for id_, count in sorted(served.items()))}")


def status(client: GPUWorkerPoolClient) -> None:
    """Show all servers as one pool, and each by itself."""
    title("Status and metrics")
    found = client.get_pool_status()
    assert isinstance(found, MultiEndpointPoolStatus)
    print(f"  {found.healthy_endpoints} of {found.total_endpoints} servers, {found.total_gpus} GPUs")
    for endpoint in client.get_endpoints_info() or []:
        print(f"  {endpoint['endpoint_id']}: {endpoint['total_gpus']} GPUs, {endpoint['response_time_ms']} ms")
    balancer = client.get_detailed_metrics()["load_balancer"]
    print(f"  {balancer['total_requests']} requests so far, {balancer['success_rate']} % of them served")


async def failover(client: GPUWorkerPoolClient, servers: Sequence[ServerProcess]) -> None:
    """One server dies: the other serves on. It comes back: it is used again, with the leases that it had."""
    first, second = servers
    title("A server is killed with -9")
    first.kill()
    assignment = await client.request_gpu(timeout=30)
    print(f"  the next request is served by {assignment.endpoint_id}")
    await client.release_gpu(assignment)
    await until(lambda: len(client.get_error_recovery_status()["degraded_endpoints"]) == 1)
    client.print_error_recovery_summary()

    title("Both are down, and a request waits for a server")
    second.kill()
    await until(lambda: client.get_error_recovery_status()["degradation_manager"]["is_fully_degraded"])
    waiting = asyncio.create_task(client.queue_request_for_retry(lambda: client.request_gpu(timeout=30)))
    print("  queued; now the first server is started again")
    first.launch()
    await asyncio.to_thread(first.wait_until_ready)
    (endpoint_id,) = (found["endpoint_id"] for found in client.get_endpoints_info() or [] if found["url"] == first.url)
    # The client would find it by itself soon; this program knows that it is back, and need not wait.
    has_answered = await client.trigger_endpoint_recovery(endpoint_id)
    assignment = await waiting
    print(f"  asked now, {endpoint_id} answered: {has_answered}; the request has got {assignment.gpu_id}")
    await client.release_gpu(assignment)

    title("The second one is back too")
    second.launch()
    await until(lambda: not client.get_error_recovery_status()["degraded_endpoints"])
    client.print_error_recovery_summary()


async def until(is_so: Callable[[], bool]) -> None:
    """Let the client poll until this is so."""
    async with asyncio.timeout(SOON_S):
        while not is_so():  # noqa: ASYNC110 - the client has no event for it
            await asyncio.sleep(0.02)


async def main(urls: Sequence[str], own_servers: Sequence[ServerProcess]) -> None:
    """All of it, one after the other."""
    await strategies(urls)
    # Short intervals, so that the example need not wait for the next poll; the defaults are kinder to the servers.
    async with GPUWorkerPoolClient(
        service_endpoints=list(urls), polling_interval=0.2, endpoint_health_check_interval=0.5, endpoint_max_retries=0
    ) as client:
        if own_servers:  # a start waits for the first answer, not for all
            await until(lambda: not client.get_error_recovery_status()["degraded_endpoints"])
        await global_ids(client)
        status(client)
        if own_servers:
            await failover(client, own_servers)
        else:
            print("\nLeft out on servers that others use: killing them.")


if __name__ == "__main__":
    with example_pool("One client, several GPU servers.", "4xA100-80GB", "2xT4") as pool:
        try:
            asyncio.run(main(pool.urls, pool.servers))
        except (PoolError, ValueError) as error:
            sys.exit(f"multi_endpoint_usage: {error}")
