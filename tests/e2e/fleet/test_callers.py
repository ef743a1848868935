"""The client and the commands at two real boxes of a real fleet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool.client import GPUWorkerPoolClient
from tests.cli.in_process import called
from tests.client.fault_tools import QUICK, soon
from tests.ledger.postgres.server import PostgresServer

from .fleet import GPUS, Box, Fleet, fleet_of, until

NODES = ("candidate0", "candidate1")


@pytest.fixture(scope="module")
def fleet(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    postgres.create_database("callers")
    with fleet_of(postgres, "callers", tmp_path_factory.mktemp("fleet"), 2) as found:
        until(lambda: len(free(found.candidates[0])) == 2 * GPUS, "all boxes are up")
        yield found


def free(box: Box) -> list[Any]:
    status, pool = box.call("GET", "/fleet/pool")
    return [gpu for gpu in pool["gpus"] if gpu["state"] == "free"] if status == 200 else []


def urls(fleet: Fleet) -> list[str]:
    return [box.url for box in fleet.candidates]


def shown(*arguments: str, boxes: list[str]) -> Any:
    done = called(*arguments, "--json", env={"GPU_SERVICE_ENDPOINTS": ",".join(boxes)})
    assert done.code == 0, done
    return json.loads(done.out)


async def test_the_client_uses_all_boxes_as_one_pool(fleet: Fleet) -> None:
    async with GPUWorkerPoolClient(service_endpoints=urls(fleet), **QUICK) as client:
        held = [await client.request_gpu(timeout=30) for _ in range(2 * GPUS)]
        names = {f"127.0.0.1-{box.port}:{index}" for box in fleet.candidates for index in range(GPUS)}
        assert {item.gpu_id for item in held} == names
        assert client.get_pool_status().total_gpus == 2 * GPUS
        # Each box shows its own, and together they are no more than all.
        listed = await asyncio.to_thread(shown, "jobs", boxes=urls(fleet))
        assert {lease["id"] for lease in listed["leases"]} == {item.lease_id for item in held}
        assert len(listed["leases"]) == 2 * GPUS
        for item in held:
            await client.release_gpu(item)
    await soon(lambda: len(free(fleet.candidates[0])) == 2 * GPUS, "all GPUs are free again")


async def test_a_gang_has_an_environment_for_each_node(fleet: Fleet) -> None:
    async with GPUWorkerPoolClient(urls(fleet)[0], scope="fleet", **QUICK) as client:
        held = await client.request_gpu(timeout=30, gpus=GPUS, nodes=2)
        assert set(held.node_envs) == set(NODES)
        assert all(env["CUDA_VISIBLE_DEVICES"].count(",") == GPUS - 1 for env in held.node_envs.values())
        await client.release_gpu(held)
    await soon(lambda: len(free(fleet.candidates[0])) == 2 * GPUS, "all GPUs are free again")


def test_status_shows_a_box_or_the_whole_fleet(fleet: Fleet) -> None:
    box = shown("status", boxes=urls(fleet)[:1])
    assert (box["node"], len(box["gpus"])) == ("candidate0", GPUS)
    whole = shown("status", "--fleet", boxes=urls(fleet))
    assert [len(item["gpus"]) for item in whole["endpoints"]] == [2 * GPUS, 2 * GPUS]
    assert [item["same_as"] for item in whole["endpoints"]] == [None, f"127.0.0.1-{fleet.candidates[0].port}"]
    text = called("status", env={"GPU_SERVICE_ENDPOINT": urls(fleet)[1]}).out
    assert "A box of fleet" in text
    assert "--fleet shows all of it" in text


def test_fleet_shows_who_leads_and_forgets_no_box_that_is_there(fleet: Fleet) -> None:
    found = shown("fleet", boxes=urls(fleet)[1:])
    assert [box["node"] for box in found["boxes"]] == list(NODES)
    assert sorted(box["is_leader"] for box in found["boxes"]) == [False, True]
    table = called("fleet", env={"GPU_SERVICE_ENDPOINT": urls(fleet)[1]}).out
    assert sorted(line.split()[1] for line in table.splitlines()[2:]) == ["follower", "leader"]
    refused = called("fleet", "forget", "candidate1", env={"GPU_SERVICE_ENDPOINT": urls(fleet)[0]})
    assert (refused.code, "is connected" in refused.err) == (1, True)
    refused = called("fleet", "forget", "nowhere", env={"GPU_SERVICE_ENDPOINT": urls(fleet)[0]})
    assert (refused.code, "no node nowhere is known" in refused.err) == (1, True)


def test_drain_names_a_node_of_the_fleet(fleet: Fleet) -> None:
    env = {"GPU_SERVICE_ENDPOINT": urls(fleet)[0]}
    try:
        done = called("drain", "candidate1", env=env)
        assert done.code == 0, done
        assert len(done.out.splitlines()) == GPUS
        assert {gpu["node"] for gpu in free(fleet.candidates[0])} == {"candidate0"}
        wrong = called("drain", "candidate7", env=env)
        assert (wrong.code, "its nodes are candidate0, candidate1" in wrong.err) == (2, True)
    finally:
        called("undrain", "candidate1", env=env)
    until(lambda: len(free(fleet.candidates[0])) == 2 * GPUS, "all GPUs are free again")


def test_a_gpu_of_another_box_is_booked_in_the_fleet(fleet: Fleet) -> None:
    env = {"GPU_SERVICE_ENDPOINT": urls(fleet)[0]}
    span = ("--at", "2h", "--for", "1h")
    wrong = called("reserve", "--gpu", "candidate1:7", *span, env=env)
    assert (wrong.code, "'candidate1:7' is not a GPU of " in wrong.err) == (2, True)
    booked = called("reserve", "--gpu", "candidate1:1", "--json", *span, env=env)
    assert booked.code == 0, booked
    assert [gpu["node"] for gpu in booked.json["gpus"]] == ["candidate1"]
    assert called("reserve", "--cancel", booked.json["id"], env=env).code == 0


def test_usage_and_quotas_are_counted_once(fleet: Fleet) -> None:
    first, second = (shown("report", boxes=[url])["total"]["leases"] for url in urls(fleet)[:2])
    assert first == second > 0
    done = called("quota", "set", "carol", "--gpus", "1", env={"GPU_SERVICE_ENDPOINT": urls(fleet)[0]})
    assert (done.code, len(done.out.splitlines())) == (0, 1), done
    called("quota", "remove", "carol", env={"GPU_SERVICE_ENDPOINT": urls(fleet)[1]})
