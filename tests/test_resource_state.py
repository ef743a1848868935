"""Who has which GPU: clients of one process keep off each other's, and what is released is free again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import gpu_worker_pool
from gpu_worker_pool import GPUWorkerPoolClient, WorkerTimeoutError
from gpu_worker_pool.testing import ServerProcess
from tests.client.fault_tools import as_at_first
from tests.client.statistics_server import StatisticsServer

SOON_S = 20.0


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "1"}) as server:
        yield server


@pytest.fixture
def server(one_gpu: ServerProcess) -> Iterator[ServerProcess]:
    yield one_gpu
    as_at_first([one_gpu])


async def test_what_one_client_gives_back_another_one_who_waits_gets_at_once() -> None:
    async with (
        StatisticsServer(1) as server,
        GPUWorkerPoolClient(server.url, polling_interval=3600) as one,
        GPUWorkerPoolClient(server.url, polling_interval=3600) as other,
    ):
        mine = await one.request_gpu()
        with pytest.raises(WorkerTimeoutError):
            await other.request_gpu(timeout=0)
        waiting = asyncio.create_task(other.request_gpu(timeout=SOON_S))
        await asyncio.sleep(0)
        await one.release_gpu(mine)
        assert (await waiting).gpu_id == mine.gpu_id


async def test_threads_with_a_pool_each_do_not_share_a_gpu_either() -> None:
    lock, held, collisions = threading.Lock(), set[Any](), []

    def work(url: str) -> None:
        with gpu_worker_pool.gpu(service_endpoint=url, timeout=SOON_S) as assignment:
            with lock:
                if assignment.gpu_id in held:
                    collisions.append(assignment.gpu_id)
                held.add(assignment.gpu_id)
            with lock:
                held.discard(assignment.gpu_id)

    async with StatisticsServer(2) as server:
        await asyncio.gather(*(asyncio.to_thread(work, server.url) for _ in range(6)))
    assert collisions == []


async def test_what_is_given_back_while_the_server_is_away_is_free_when_it_is_back(server: ServerProcess) -> None:
    async with GPUWorkerPoolClient(server.url, polling_interval=0.1) as client:
        assignment = await client.request_gpu()
        await asyncio.to_thread(server.kill)
        await client.release_gpu(assignment)
        await asyncio.to_thread(server.restart)
        # Its TTL is 30 s: this is granted only if the release was made up for.
        again = await client.request_gpu(timeout=SOON_S)
        assert again.lease_id != assignment.lease_id


async def test_a_wait_that_ends_while_the_server_is_away_leaves_nothing_there(server: ServerProcess) -> None:
    async with GPUWorkerPoolClient(server.url, polling_interval=0.1) as client:
        held = await client.request_gpu()
        waiting = asyncio.create_task(client.request_gpu(timeout=SOON_S))
        async with asyncio.timeout(SOON_S):
            while client.get_pool_status().blocked_workers != 1:  # noqa: ASYNC110 - a status is no event
                await asyncio.sleep(0.01)
        await asyncio.to_thread(server.kill)
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.to_thread(server.restart)
        await client.release_gpu(held)
        assert (await client.request_gpu(timeout=SOON_S)).gpu_id == held.gpu_id


async def test_a_worker_that_has_a_gpu_when_the_client_is_stopped_hears_of_it(server: ServerProcess) -> None:
    async with GPUWorkerPoolClient(server.url) as client:
        assignment = await client.request_gpu()
        lost = asyncio.ensure_future(assignment.lost.wait()) if assignment.lost else None
    assert assignment.is_lost
    assert lost is not None
    assert await lost == "the client was stopped"
