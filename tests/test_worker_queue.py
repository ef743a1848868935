"""Workers that wait for a GPU: they block, are served in order, and leave no trace."""

from __future__ import annotations

import asyncio
from typing import Any

from gpu_worker_pool import (
    GPUWorkerPoolClient,
)
from gpu_worker_pool.client.pool_client import Assignment
from tests.client.statistics_server import StatisticsServer, until

# No test here lasts that long, so what happens is not because of a poll.
NEVER_S = 3600.0
OFTEN_S = 0.05


class Worker:
    """Holds a GPU until told to give it back."""

    def __init__(self, client: GPUWorkerPoolClient, order: list[int], number: int, **wishes: Any) -> None:
        self.number = number
        self.assignment: Assignment | None = None
        self.may_go = asyncio.Event()
        self.task = asyncio.create_task(self._work(client, order, wishes))

    async def _work(self, client: GPUWorkerPoolClient, order: list[int], wishes: dict[str, Any]) -> None:
        self.assignment = await client.request_gpu(**wishes)
        order.append(self.number)
        await self.may_go.wait()
        await client.release_gpu(self.assignment)

    @property
    def is_running(self) -> bool:
        return self.assignment is not None and not self.task.done()

    async def finish(self) -> None:
        self.may_go.set()
        await self.task


async def test_of_32_workers_on_8_idle_gpus_8_run_and_24_wait_in_order() -> None:
    order: list[int] = []
    async with (
        StatisticsServer(8) as server,
        GPUWorkerPoolClient(server.url, polling_interval=NEVER_S) as client,
    ):
        workers = [Worker(client, order, number) for number in range(32)]
        await until(lambda: len(order) == 8 and client.get_pool_status().blocked_workers == 24, "8 run and 24 wait")
        first = [worker.assignment.gpu_id for worker in workers if worker.assignment is not None]
        status = client.get_pool_status()
        before = server.polls

        for number, worker in enumerate(workers):
            await worker.finish()
            await until(lambda: len(order) == min(9 + number, 32), f"{worker.number} has given back")  # noqa: B023
            assert sum(worker.is_running for worker in workers) <= 8

        assert sorted(first) == list(range(8))
        assert (status.total_gpus, status.available_gpus, status.active_workers) == (8, 0, 8)
        assert {gpu_id: len(held_by) for gpu_id, held_by in status.gpu_assignments.items()} == dict.fromkeys(
            range(8), 1
        )
        assert order == list(range(32)), "first come, first served"
        assert server.polls == before, "a release wakes the next one, not a poll"
        assert client.get_pool_status().available_gpus == 8


async def test_a_cancelled_worker_leaves_the_line() -> None:
    async with (
        StatisticsServer(1) as server,
        GPUWorkerPoolClient(server.url, polling_interval=NEVER_S) as client,
    ):
        mine = await client.request_gpu()
        cancelled = asyncio.create_task(client.request_gpu())
        await until(lambda: client.get_pool_status().blocked_workers == 1, "one waits")
        last = asyncio.create_task(client.request_gpu(timeout=30))
        await until(lambda: client.get_pool_status().blocked_workers == 2, "two wait")

        cancelled.cancel()
        await asyncio.wait([cancelled])
        await client.release_gpu(mine)

        assert (await last).gpu_id == 0
        assert client.get_pool_status().blocked_workers == 0
