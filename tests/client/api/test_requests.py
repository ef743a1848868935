"""What a user can ask of the client: GPUs of one endpoint and of several, by wishes and for a block."""

from __future__ import annotations

import asyncio
import os
from datetime import datetime
from typing import Any

import pytest

from gpu_worker_pool import (
    GlobalGPUAssignment,
    GPUAssignment,
    GPUContextManager,
    GPUWorkerPoolClient,
    RequestRefusedError,
    WorkerTimeoutError,
    gpu_worker_pool_client,
)
from gpu_worker_pool.testing import ServerProcess
from tests.client.api.two_servers import BOTH, NEVER_S, active
from tests.client.foreign_servers import ForeignServer, ScriptedLeases
from tests.client.statistics_server import until
from tests.server.leasing import held, queued, release, take

# --- one endpoint ----------------------------------------------------------------------------------------------------


async def test_one_endpoint_has_numbers_as_ids(big: ServerProcess) -> None:
    async with GPUWorkerPoolClient(big.url) as client:
        before = datetime.now()  # noqa: DTZ005 - as the client's
        assignment = await client.request_gpu()
        assert isinstance(assignment, GPUAssignment)
        assert assignment.gpu_id in {0, 1, 2}
        assert before <= assignment.assigned_at <= datetime.now()  # noqa: DTZ005
        assert (assignment.endpoint_id, assignment.local_gpu_id) == ("127.0.0.1", assignment.gpu_id)
        assert assignment.global_gpu_id == f"127.0.0.1:{assignment.gpu_id}"
        assert not client.is_multi_endpoint_mode()
        (lease,) = active(big)
        assert (lease["id"], lease["worker_id"]) == (assignment.lease_id, assignment.worker_id)
        assert (lease["pid"], lease["fence"]) == (os.getpid(), assignment.fence)
        assert (
            assignment.env
            == lease["env"]
            == {
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "CUDA_VISIBLE_DEVICES": str(assignment.gpu_id),
            }
        )
        await client.release_gpu(assignment)
        assert active(big) == []


async def test_stopping_gives_everything_back(big: ServerProcess) -> None:
    async with GPUWorkerPoolClient(big.url) as client:
        for _ in range(3):
            await client.request_gpu()
        assert len(active(big)) == 3
    assert active(big) == []
    await client.stop()


# --- several endpoints -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("names")
async def test_several_endpoints_have_global_ids(big: ServerProcess, small: ServerProcess) -> None:
    async with GPUWorkerPoolClient(service_endpoints=BOTH) as client:
        assert client.is_multi_endpoint_mode()
        got = [await client.request_gpu(timeout=30) for _ in range(5)]
        assert all(isinstance(assignment, GlobalGPUAssignment) for assignment in got)
        assert {assignment.gpu_id for assignment in got} == {
            *(f"big.localhost:{index}" for index in range(3)),
            *(f"small.localhost:{index}" for index in range(2)),
        }
        for assignment in got:
            assert assignment.gpu_id == assignment.global_gpu_id
            assert str(assignment.gpu_id).split(":") == [assignment.endpoint_id, str(assignment.local_gpu_id)]
            assert assignment.env["CUDA_VISIBLE_DEVICES"] == str(assignment.local_gpu_id)
        assert len(active(big)) + len(active(small)) == 5
        for assignment in got:
            await client.release_gpu(assignment)
        assert active(big) + active(small) == []


@pytest.mark.usefixtures("names")
async def test_who_waits_at_several_gets_the_first_and_leaves_the_others(
    big: ServerProcess, small: ServerProcess
) -> None:
    others = {server: [take(server)["id"] for _ in range(number)] for server, number in ((big, 3), (small, 2))}
    async with GPUWorkerPoolClient(service_endpoints=BOTH, polling_interval=NEVER_S) as client:
        waiting = asyncio.create_task(client.request_gpu(timeout=30))
        await until(lambda: len(queued(big)) == len(queued(small)) == 1, "it waits at both")
        await until(lambda: client.get_pool_status().blocked_workers == 1, "it is seen to wait, once")

        release(small, others[small][0])

        assignment = await waiting
        assert assignment.endpoint_id == "small.localhost"
        await until(lambda: queued(big) == queued(small) == [], "it waits nowhere")
        assert assignment.lease_id in held(small)


@pytest.mark.usefixtures("names")
async def test_one_server_under_two_names_is_not_given_back_behind_its_holder(big: ServerProcess) -> None:
    """It waits there twice, by two ids, so what is left of one is not what is held by the other."""
    others = [take(big)["id"] for _ in range(3)]
    urls = "http://big.localhost:8000,http://also-big.localhost:8000"
    async with GPUWorkerPoolClient(service_endpoints=urls, polling_interval=NEVER_S) as client:
        waiting = asyncio.create_task(client.request_gpu(timeout=30))
        await until(lambda: len(queued(big)) == 2 and client.get_pool_status().blocked_workers == 1, "it waits")

        release(big, others[0])

        assignment = await waiting
        await until(lambda: queued(big) == [], "it waits nowhere")
        # Two calls later whatever was under way has arrived.
        await client.trigger_endpoint_recovery("big.localhost")
        await client.trigger_endpoint_recovery("also-big.localhost")
        assert not assignment.is_lost
        assert [lease["id"] for lease in active(big) if lease["id"] not in others] == [assignment.lease_id]


# --- wishes ----------------------------------------------------------------------------------------------------------


async def test_wishes(big: ServerProcess) -> None:
    async with GPUWorkerPoolClient(big.url) as client:
        two = await client.request_gpu(gpus=2, model="A100", priority=3)
        assert len(two.gpu_ids) == len(set(two.gpu_ids)) == len(two.uuids) == 2
        assert two.gpu_id == two.gpu_ids[0]
        assert two.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, two.gpu_ids))
        (lease,) = active(big)
        assert (lease["priority"], len(lease["gpus"])) == (3, 2)
        shared = [await client.request_gpu(memory_mb=4000, model="T4") for _ in range(2)]
        assert {assignment.gpu_id for assignment in shared} == {2}
        with pytest.raises(WorkerTimeoutError) as raised:
            await client.request_gpu(timeout=0.1)
        assert raised.value.waited_s is not None
        assert raised.value.reason
        hopeless: list[dict[str, Any]] = [{"gpus": 4}, {"model": "H100"}, {"memory_mb": 1e6}, {"among": [3]}]
        for wish in hopeless:
            with pytest.raises(RequestRefusedError, match=r"127\.0\.0\.1"):
                await client.request_gpu(timeout=30, **wish)


async def test_only_the_gpus_asked_for_are_assigned_and_one_waits_for_those_only(big: ServerProcess) -> None:
    uuid = big.json("/gpu/stats")["gpus"][1]["uuid"]
    async with GPUWorkerPoolClient(big.url) as client:
        two = await client.request_gpu(gpus=2, among=(2, uuid[:-4].upper()))
        assert two.gpu_ids == (1, 2)
        (lease,) = active(big)
        assert lease["wishes"]["among"] == ["2", uuid[:-4].upper()]
        with pytest.raises(WorkerTimeoutError) as raised:
            await client.request_gpu(timeout=2, among=["1"])
        assert raised.value.reason is not None
        assert "not asked for" in raised.value.reason
        assert (await client.request_gpu(timeout=30)).gpu_id == 0
        (plain,) = [lease for lease in active(big) if len(lease["gpus"]) == 1]
        assert plain["wishes"]["among"] is None


async def test_gpus_by_their_memory_by_several_models_and_without_some(big: ServerProcess) -> None:
    async with GPUWorkerPoolClient(big.url) as client:
        large = await client.request_gpu(timeout=30, min_memory="40GB", exclude=[0])
        assert large.gpu_id == 1
        (lease,) = active(big)
        assert (lease["wishes"]["min_memory_mb"], lease["wishes"]["exclude"]) == (40 * 1024, ["0"])
        assert (await client.request_gpu(timeout=30, model="H100, T4")).gpu_id == 2
        with pytest.raises(
            RequestRefusedError, match="1 GPU of 90 GB or more was asked for; the largest GPU here has 80 GB"
        ):
            await client.request_gpu(timeout=30, min_memory_mb=90 * 1024)
        with pytest.raises(RequestRefusedError, match="all but 2 was asked for"):
            await client.request_gpu(timeout=30, model="T4", exclude=["2"])
        with pytest.raises(WorkerTimeoutError, match="1 not asked for"):
            await client.request_gpu(timeout=2, min_memory="40GB", exclude=[0])


async def test_a_server_that_knows_no_such_wish_is_asked_without_it_where_there_is_none() -> None:
    with ForeignServer(ScriptedLeases().behaviour()) as foreign:
        async with GPUWorkerPoolClient(foreign.url) as client:
            await client.request_gpu()
            await client.request_gpu(among=[0])
        sent = [seen.json for seen in foreign.asked("PUT")]
    assert "among" not in sent[0]
    assert sent[1]["among"] == ["0"]


@pytest.mark.parametrize(
    "wish",
    [
        {"gpus": 0},
        {"memory_mb": -1},
        {"min_memory": "much"},
        {"exclude": ["x"]},
        {"timeout": -1},
        {"timeout": float("nan")},
    ],
)
async def test_a_wish_that_makes_no_sense_is_refused_by_name(big: ServerProcess, wish: dict[str, Any]) -> None:
    async with GPUWorkerPoolClient(big.url) as client:
        with pytest.raises(ValueError, match=next(iter(wish))):
            await client.request_gpu(**wish)
        assert client.get_pool_status().blocked_workers == 0


async def test_a_timeout_of_zero_takes_what_is_free_and_waits_for_nothing(big: ServerProcess) -> None:
    async with GPUWorkerPoolClient(big.url) as client:
        held = await client.request_gpu(timeout=0, gpus=3)
        with pytest.raises(WorkerTimeoutError, match="leased by"):
            await client.request_gpu(timeout=0, gpus=3)
        assert [lease["id"] for lease in big.json("/leases")["leases"]] == [held.lease_id]


# --- contexts --------------------------------------------------------------------------------------------------------


async def test_a_gpu_for_a_block(big: ServerProcess) -> None:
    async with gpu_worker_pool_client(service_endpoint=big.url, memory_threshold=75.0) as client:
        async with GPUContextManager(client, timeout=30, memory_mb=1000) as gpu_id:
            (lease,) = active(big)
            assert lease["gpus"][0]["gpu_id"] == gpu_id
            assert lease["memory_mb"] == 1000
        assert active(big) == []
        context = GPUContextManager(client)
        with pytest.raises(ZeroDivisionError):
            async with context:
                raise ZeroDivisionError
        assert active(big) == []
        assert context.assignment is None
