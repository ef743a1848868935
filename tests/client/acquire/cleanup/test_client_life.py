"""Starting and stopping a client, also when that is cancelled or fails: nothing is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.client.acquire.cleanup.tasks import waiting
from tests.client.fault_tools import Leftovers, client_of, healthy, lease_ids, occupy, sockets, soon
from tests.client.foreign_servers import ForeignServer, ScriptedLeases, hanging, internal_error, statistics
from tests.server.leasing import release


async def test_a_client_that_is_stopped_while_others_wait_lets_them_go_and_leaves_the_queues(
    servers: list[ServerProcess],
) -> None:
    before = Leftovers()
    others = occupy(*servers)
    client = client_of(*servers)
    await client.start()
    await healthy(client, *servers)
    tasks = [await waiting(client, *servers) for _ in range(3)]
    await client.stop()
    await soon(lambda: lease_ids(*servers) == set(others), "the queues are left", 10)
    done, _ = await asyncio.wait(tasks, timeout=15)
    assert len(done) == 3, "those that waited are told"
    assert all(task.cancelled() or task.exception() is not None for task in tasks)
    for server, other in zip(servers, others, strict=True):
        release(server, other)
    await before.none(*servers)


async def test_a_client_of_a_statistics_only_server_that_is_stopped_while_others_wait_lets_them_go() -> None:
    with ForeignServer(statistics(1)) as foreign:
        before = Leftovers()
        client = client_of(foreign)
        await client.start()
        await client.request_gpu(timeout=30)
        tasks = [asyncio.create_task(client.request_gpu(timeout=20)) for _ in range(3)]
        await soon(lambda: client.get_pool_status().blocked_workers == 3, "they wait")
        await client.stop()
        done, _ = await asyncio.wait(tasks, timeout=15)
        assert len(done) == 3
        assert all(task.cancelled() or task.exception() is not None for task in tasks)
        assert not before.tasks_left()


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 8, 16])
async def test_a_start_that_is_cancelled_leaves_nothing_and_can_be_made_again(
    servers: list[ServerProcess], steps: int
) -> None:
    with ForeignServer(hanging) as hung, ForeignServer(statistics(1)) as foreign:
        before = Leftovers()
        client = client_of(hung, foreign, *servers)
        task = asyncio.create_task(client.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await client.stop()
        assert not before.tasks_left()
        await client.start()
        await client.request_gpu(timeout=30)
        await client.stop()
        assert not before.tasks_left()
    await before.none(*servers)


async def test_a_start_that_fails_leaves_nothing(servers: list[ServerProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    before = Leftovers()
    monkeypatch.setenv("GPU_POOL_CA_FILE", "/nowhere/ca.pem")
    client = client_of(*servers)
    with pytest.raises(ValueError, match="GPU_POOL_CA_FILE"):
        await client.start()
    await client.stop()
    await before.none(*servers)


async def test_a_stop_that_is_cancelled_ends_everything_all_the_same() -> None:
    with ForeignServer(ScriptedLeases().behaviour()) as foreign:
        before = Leftovers()
        client = client_of(foreign, endpoint_timeout=1)
        await client.start()
        await client.request_gpu(timeout=30)
        foreign.behaviour = hanging
        task = asyncio.create_task(client.stop())
        await soon(lambda: foreign.asked("DELETE"), "it is giving back")
        task.cancel()
        await asyncio.wait([task], timeout=15)
        assert task.done()
        await soon(lambda: not before.tasks_left(), f"all tasks are over: {before.tasks_left()}", 15)


@pytest.mark.parametrize("behaviour", [hanging, internal_error])
async def test_a_stop_is_not_held_up_by_a_server_that_does_not_answer(behaviour: Any) -> None:
    with ForeignServer(ScriptedLeases().behaviour()) as foreign:
        before = Leftovers()
        loop = asyncio.get_running_loop()
        async with client_of(foreign) as client:
            await client.request_gpu(timeout=30)
            foreign.behaviour = behaviour
            began = loop.time()
        assert loop.time() - began < 15
        assert not before.tasks_left()
    await soon(lambda: not sockets() - before.sockets, "all sockets are closed", 15)
