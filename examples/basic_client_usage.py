"""The client in its everyday use: one GPU server, one program.

python examples/basic_client_usage.py                                  # with a server of its own, on simulated GPUs
python examples/basic_client_usage.py --endpoint http://gpu-1:8000     # with yours
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from example_servers import example_pool, title

import gpu_worker_pool
from gpu_worker_pool import (
    ClientEvent,
    GPUContextManager,
    GPUWorkerPoolClient,
    PoolError,
    RequestRefusedError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from gpu_worker_pool.testing import ServerProcess

# Stands for your training script: it prints which GPUs it would see.
TRAINING = "import os; print('  the program sees CUDA_VISIBLE_DEVICES =', os.environ['CUDA_VISIBLE_DEVICES'])"


async def by_hand(client: GPUWorkerPoolClient) -> None:
    """Request, use, release: the long way, for programs that need the assignment itself."""
    title("Request a GPU, and give it back")
    assignment = await client.request_gpu(timeout=30)
    try:
        print(f"  GPU {assignment.gpu_id} is ours since {assignment.assigned_at:%H:%M:%S}")
    finally:
        await client.release_gpu(assignment)
    print("  given back")


async def with_a_context(client: GPUWorkerPoolClient) -> None:
    """Use a context: whatever happens in the block, the GPU is released."""
    title("The same with a context, which gives it back after an exception too")

    def train(gpu_id: int | str) -> None:
        print(f"  on GPU {gpu_id}")
        raise ArithmeticError("the loss is not a number")

    try:
        async with GPUContextManager(client, timeout=30) as gpu_id:
            train(gpu_id)
    except ArithmeticError as error:
        print(f"  the training failed ({error}), and the GPU is given back")


async def waiting_workers(url: str) -> None:
    """Start more workers than GPUs: they wait, and are served in the order of arrival."""
    title("Five workers in one program, and fewer GPUs")

    def say_who_waits(event: ClientEvent) -> None:
        if event.kind == "waiting":
            print(f"  {event.detail}")

    async def worker(client: GPUWorkerPoolClient, number: int) -> None:
        async with GPUContextManager(client, timeout=60) as gpu_id:
            print(f"  worker {number} works on GPU {gpu_id}")
            await asyncio.sleep(0.1)  # the work

    async with GPUWorkerPoolClient(url, on_event=say_who_waits) as client, asyncio.TaskGroup() as workers:
        for number in range(1, 6):
            workers.create_task(worker(client, number))


async def several_gpus(client: GPUWorkerPoolClient) -> None:
    """Request all of them at once or none, and all on one server."""
    title("Several GPUs at once")
    try:
        assignment = await client.request_gpu(timeout=30, gpus=2)
    except RequestRefusedError as error:  # what can never be served is not queued
        print(f"  {error}")
        return
    print(f"  GPUs {assignment.gpu_ids}; for the environment of a program: {dict(assignment.env)}")
    await client.release_gpu(assignment)


async def shared_gpus(client: GPUWorkerPoolClient) -> None:
    """Request memory: such jobs may share a GPU with others that did so."""
    title("Three small jobs, which share GPUs where they must")
    jobs = [await client.request_gpu(timeout=30, memory_mb=4000) for _ in range(3)]
    print(f"  4000 MB each, on the GPUs {', '.join(str(job.gpu_id) for job in jobs)}")
    for job in jobs:
        await client.release_gpu(job)


async def timeouts(client: GPUWorkerPoolClient) -> None:
    """Wait no longer than the timeout; then the error says why there was no GPU."""
    title("No GPU in time")
    held = [await client.request_gpu(timeout=30) for _ in range(client.get_pool_status().total_gpus)]
    try:
        await client.request_gpu(timeout=1)
    except WorkerTimeoutError as error:
        print(f"  WorkerTimeoutError: {error}")
    for assignment in held:
        await client.release_gpu(assignment)


async def a_lost_gpu(server: ServerProcess) -> None:
    """A lease can be lost: an operator takes it away, or the server is out of reach for too long. One is told early."""
    title("Being told that a GPU is lost")
    # The client sends three heartbeats in this time. With the default of 30 s the example would take longer.
    os.environ["GPU_POOL_TTL"] = "3"
    async with GPUWorkerPoolClient(server.url, on_lost=lambda lost: print(f"  on_lost: GPU {lost.gpu_id}")) as client:
        assignment = await client.request_gpu(timeout=30)
        print(f"  working on GPU {assignment.gpu_id}, and an operator takes it away")
        await asyncio.to_thread(server.ask, f"/admin/leases/{assignment.lease_id}/revoke", "POST")
        assert assignment.lost is not None
        print(f"  await assignment.lost: {await assignment.lost}")  # for example in its own task, beside your work
        try:
            await client.release_gpu(assignment)
        except StaleAssignmentError as error:
            print(f"  StaleAssignmentError: {error}")
    del os.environ["GPU_POOL_TTL"]


def without_asyncio(url: str) -> None:
    """Use the blocking twin, and a program that sees the granted GPUs and no others."""
    title("Without asyncio: a GPU for another program")
    with gpu_worker_pool.gpu(timeout=30, service_endpoint=url) as assignment:
        subprocess.run([sys.executable, "-c", TRAINING], env={**os.environ, **assignment.env}, check=True)
    print("  given back")


async def main(url: str, own_server: ServerProcess | None) -> None:
    """All of it, one after the other."""
    async with GPUWorkerPoolClient(url) as client:
        await by_hand(client)
        await with_a_context(client)
        await several_gpus(client)
        await shared_gpus(client)
        if own_server is None:
            print("\nLeft out on a server that others use: taking all GPUs, and taking one away from its holder.")
            return
        await timeouts(client)
    await waiting_workers(url)
    await a_lost_gpu(own_server)


if __name__ == "__main__":
    with example_pool("The client in its everyday use.", "2") as pool:
        try:
            asyncio.run(main(pool.urls[0], pool.servers[0] if pool.servers else None))
            without_asyncio(pool.urls[0])
        except (PoolError, ValueError) as error:
            sys.exit(f"basic_client_usage: {error}")
