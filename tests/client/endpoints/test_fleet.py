"""Endpoints of one fleet are entry points of one pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from gpu_worker_pool import GPUWorkerPoolClient
from gpu_worker_pool.models import MultiEndpointPoolStatus
from gpu_worker_pool.testing import ServerProcess
from tests.client.entry_points import EntryPoint
from tests.client.fault_tools import client_of, id_of, lease_ids, nothing_left, soon
from tests.client.foreign_servers import hanging
from tests.server.leasing import release_all

NODES = {"a": (0, 1), "b": (2, 3)}


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "4"}) as server:
        yield server


@pytest.fixture
def pool(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    release_all(running)


@pytest.fixture
def boxes(pool: ServerProcess) -> Iterator[tuple[EntryPoint, EntryPoint]]:
    with ExitStack() as stack:
        a, b = (stack.enter_context(EntryPoint(pool, node, NODES)) for node in NODES)
        yield a, b


@asynccontextmanager
async def known_boxes(*entries: EntryPoint | ServerProcess, **options: Any) -> AsyncIterator[GPUWorkerPoolClient]:
    """A client that knows all of them: one that answers late is called by its node until then."""
    async with client_of(*entries, **options) as client:
        await soon(lambda: _healthy(client) == len(entries), "all have answered")
        yield client


def _healthy(client: GPUWorkerPoolClient) -> int:
    status = client.get_pool_status()
    assert isinstance(status, MultiEndpointPoolStatus)
    return status.healthy_endpoints


@pytest.mark.parametrize("strategy", ["availability", "round_robin", "weighted"])
async def test_a_request_has_one_place_in_line(
    pool: ServerProcess, boxes: tuple[EntryPoint, EntryPoint], strategy: str
) -> None:
    a, b = boxes
    async with known_boxes(a, b, load_balancing_strategy=strategy) as client:
        held = [await client.request_gpu() for _ in range(4)]
        assert sorted(item.gpu_id for item in held) == sorted(
            f"{id_of(box)}:{index}" for box in boxes for index in NODES[box.node]
        )
        with pytest.raises(TimeoutError):
            await client.request_gpu(timeout=0.2)
        assert all(item.endpoint_id == str(item.gpu_id).rpartition(":")[0] for item in held)
        puts = [seen.path for box in boxes for seen in box.asked("PUT")]
        assert len(puts) == len(set(puts))
        assert all(path.startswith("/fleet/leases/") for path in puts)
        entries = {box.node for box in boxes if box.asked("PUT")}
        assert entries == {"a", "b"} or strategy == "availability"
    await nothing_left(pool)


async def test_the_status_shows_the_fleet_once(pool: ServerProcess, boxes: tuple[EntryPoint, EntryPoint]) -> None:
    async with known_boxes(*boxes) as client:
        held = await client.request_gpu()
        status = client.get_pool_status()
        assert isinstance(status, MultiEndpointPoolStatus)
        assert (status.total_gpus, status.available_gpus, status.active_workers) == (4, 3, 1)
        assert list(status.gpu_assignments) == [held.gpu_id]
        assert [info.total_gpus for info in status.endpoints] == [2, 2]
        assert len(client.get_detailed_metrics()["gpu_metrics"]) == 4


async def test_a_box_that_is_no_endpoint_is_called_by_its_node(pool: ServerProcess) -> None:
    with EntryPoint(pool, "a", NODES) as a, EntryPoint(pool, "c", {"a": (0, 1), "b": (2, 3)}) as c:
        async with known_boxes(a, c) as client:
            held = [await client.request_gpu() for _ in range(4)]
            assert {item.endpoint_id for item in held} == {id_of(a), "b"}


@pytest.mark.parametrize("how", ["leaderless", "hanging"])
async def test_what_one_entry_point_does_not_take_is_asked_of_the_next_under_the_same_id(
    pool: ServerProcess, boxes: tuple[EntryPoint, EntryPoint], how: str
) -> None:
    a, b = boxes
    async with known_boxes(a, b, load_balancing_strategy="round_robin") as client:
        if how == "leaderless":
            a.is_leaderless = True
        else:
            a.behaviour = hanging
        for _ in range(2):  # one of them begins at each
            await client.release_gpu(await client.request_gpu(timeout=20))
    assert {seen.path for seen in a.asked("PUT")} <= {seen.path for seen in b.asked("PUT")}
    await nothing_left(pool)


@pytest.mark.parametrize("how", ["leaderless", "hanging"])
async def test_a_lease_is_renewed_at_any_entry_point(
    pool: ServerProcess, boxes: tuple[EntryPoint, EntryPoint], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TTL", "3")
    a, b = boxes
    async with known_boxes(a, b) as client:
        held = [await client.request_gpu() for _ in range(4)]
        homes = {item.endpoint_id for item in held}
        assert homes == {id_of(a), id_of(b)}
        if how == "leaderless":
            a.is_leaderless = True
        else:
            a.behaviour = hanging
        at_a = {item.lease_id for item in held if item.endpoint_id == id_of(a)}
        began = asyncio.get_running_loop().time()

        def renewed_at_b() -> bool:
            renewed = {id_ for seen in b.asked("POST", "/fleet/leases/renew") for id_ in seen.json["ids"]}
            return at_a <= renewed and asyncio.get_running_loop().time() - began > 4.0  # more than a TTL

        await soon(renewed_at_b, "the other entry point renews them")
        assert not any(item.is_lost for item in held)
        assert len(lease_ids(pool)) == 4
        for item in held:
            await client.release_gpu(item)
        await nothing_left(pool)


async def test_boxes_of_one_pool_that_are_asked_for_their_own_gpus_do_not_share_an_id(
    pool: ServerProcess, boxes: tuple[EntryPoint, EntryPoint]
) -> None:
    """In one pool an id is one lease: what is left at one box must not be what is held at the other."""
    async with known_boxes(*boxes, scope="box") as client:
        held = [await client.request_gpu() for _ in range(4)]
        with pytest.raises(TimeoutError):
            await client.request_gpu(timeout=0.2)
        released = {seen.lease_id for box in boxes for seen in box.asked("DELETE")}
        assert released.isdisjoint(str(item.lease_id) for item in held)
        assert lease_ids(pool) == {item.lease_id for item in held}
    await nothing_left(pool)


async def test_a_box_that_does_not_know_its_fleet_yet_is_not_asked(
    pool: ServerProcess, boxes: tuple[EntryPoint, EntryPoint]
) -> None:
    a, b = boxes
    b.is_known = False
    async with known_boxes(a, b) as client:
        await client.request_gpu()
        assert not b.asked("PUT")
        b.is_known = True
        await soon(lambda: client.get_pool_status().total_gpus == 4, "it is an entry point")


async def test_one_endpoint_stands_for_its_own_box(pool: ServerProcess, boxes: tuple[EntryPoint, EntryPoint]) -> None:
    async with client_of(boxes[0]) as client:
        await client.request_gpu()
        assert client.get_pool_status().total_gpus == 2
        assert not boxes[0].asked("PUT", "/fleet")
    async with client_of(boxes[0], scope="fleet") as client:
        held = await client.request_gpu()
        assert client.get_pool_status().total_gpus == 4
        assert boxes[0].asked("PUT", "/fleet")
        assert held.gpu_id in {"127.0.0.1:0", "127.0.0.1:1", "b:2", "b:3"}


async def test_a_fleet_and_a_box_of_its_own(pool: ServerProcess, boxes: tuple[EntryPoint, EntryPoint]) -> None:
    with ServerProcess({"SIMULATED_GPUS": "2"}) as single:
        async with known_boxes(*boxes, single) as client:
            held = [await client.request_gpu() for _ in range(6)]
            assert sum(item.endpoint_id == id_of(single) for item in held) == 2
            assert client.get_pool_status().total_gpus == 6
        await nothing_left(pool, single)
