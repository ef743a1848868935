"""The client and the commands at two real boxes of a real fleet."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.client import GPUWorkerPoolClient
from tests.cli.in_process import called
from tests.cli.own_process import environment, gpu_pool
from tests.client.fault_tools import QUICK, soon
from tests.documents.blocks import ROOT, blocks_of
from tests.documents.schemas import unlike
from tests.ledger.postgres.server import PostgresServer

from .fleet import GPUS, Box, Fleet, fleet_of, until

KEY = "a-key-that-is-long-enough"
NODES = ("candidate0", "candidate1")


@pytest.fixture(scope="module")
def fleet(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    postgres.create_database("callers")
    with fleet_of(postgres, "callers", tmp_path_factory.mktemp("fleet"), 2, GPU_POOL_FLEET_KEY=KEY) as found:
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
        for scope in ((), ("--fleet",)):
            listed = await asyncio.to_thread(shown, "leases", *scope, boxes=urls(fleet))
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
    (box,) = shown("status", boxes=urls(fleet)[:1])["endpoints"]
    assert (box["node"], len(box["gpus"])) == ("candidate0", GPUS)
    whole = shown("status", "--fleet", boxes=urls(fleet))
    assert whole["gpus_total"] == 2 * GPUS
    assert [item["same_as"] for item in whole["endpoints"]] == [None, f"127.0.0.1-{fleet.candidates[0].port}"]
    text = called("status", env={"GPU_SERVICE_ENDPOINT": urls(fleet)[1]}).out
    assert "A box of fleet" in text
    assert "--fleet shows all of it" in text


def test_fleet_shows_who_leads_and_forgets_no_box_that_is_there(fleet: Fleet) -> None:
    found = shown("fleet", boxes=urls(fleet)[1:])
    assert [box["node"] for box in found["boxes"]] == list(NODES)
    (block,) = [block for block in blocks_of(ROOT / "docs" / "CLI.md") if "gpu-pool/fleet/1" in block.text]
    assert unlike(json.loads(block.text), found) == []
    assert sorted(box["role"] for box in found["boxes"]) == ["follower", "leader"]
    assert all(box["error"] is None for box in found["boxes"])
    refused = called("fleet", "forget", "candidate1", env={"GPU_SERVICE_ENDPOINT": urls(fleet)[0]})
    assert (refused.code, "is connected" in refused.err) == (1, True)
    refused = called("fleet", "forget", "nowhere", env={"GPU_SERVICE_ENDPOINT": urls(fleet)[0]})
    assert (refused.code, "no node nowhere is known" in refused.err) == (1, True)


def test_drain_names_a_node_of_the_fleet(fleet: Fleet) -> None:
    env = {"GPU_SERVICE_ENDPOINT": urls(fleet)[0]}
    try:
        done = called("drain", "candidate1", "--fleet", env=env)
        assert done.code == 0, done
        assert len(done.out.splitlines()) == GPUS
        assert {gpu["node"] for gpu in free(fleet.candidates[0])} == {"candidate0"}
        wrong = called("drain", "candidate7", "--fleet", env=env)
        assert (wrong.code, "its nodes are candidate0, candidate1" in wrong.err) == (2, True)
    finally:
        called("undrain", "candidate1", "--fleet", env=env)
    until(lambda: len(free(fleet.candidates[0])) == 2 * GPUS, "all GPUs are free again")


def test_a_gpu_of_another_box_is_booked_in_the_fleet(fleet: Fleet) -> None:
    env = {"GPU_SERVICE_ENDPOINT": urls(fleet)[0]}
    span = ("--at", "2h", "--for", "1h", "--fleet")
    wrong = called("reserve", "--gpu", "candidate1:7", *span, env=env)
    assert (wrong.code, "'candidate1:7' is not a GPU of the fleet" in wrong.err) == (2, True)
    booked = called("reserve", "--gpu", "candidate1:1", "--id", "course", *span, env=env)
    assert booked.code == 0, booked
    assert "candidate1:1" in booked.out
    assert called("reserve", "--cancel", "course", env=env).code == 1, "it is of another box"
    assert called("reserve", "--cancel", "course", "--fleet", env=env).code == 0


def test_top_shows_temperature_and_power_of_all_boxes(fleet: Fleet) -> None:
    (seen,) = shown("top", "--once", "--fleet", boxes=urls(fleet)[:1])["endpoints"]
    assert {gpu["node"] for gpu in seen["gpus"]} == set(NODES)
    assert all(gpu["temperature_c"] and gpu["power_draw_w"] for gpu in seen["gpus"])


def test_usage_and_quotas_are_counted_once(fleet: Fleet) -> None:
    once, twice = (shown("report", "--fleet", boxes=boxes) for boxes in (urls(fleet)[:1], urls(fleet)))
    assert twice["total"]["leases"] == once["total"]["leases"] > 0
    # Each box reports its own, which is all of it together; the gang was on both.
    assert shown("report", boxes=urls(fleet))["total"]["leases"] == once["total"]["leases"] + 1
    warning = "a lease on several of them is counted at each; --fleet counts it once"
    for scope, is_warned in (((), True), (("--fleet",), False)):
        told = called("report", *scope, env={"GPU_SERVICE_ENDPOINTS": ",".join(urls(fleet))}).err
        assert (warning in " ".join(told.split())) is is_warned, told
    done = called("quota", "set", "carol", "--gpus", "1", env={"GPU_SERVICE_ENDPOINTS": ",".join(urls(fleet))})
    assert (done.code, len(done.out.splitlines())) == (0, 1), done
    called("quota", "remove", "carol", env={"GPU_SERVICE_ENDPOINT": urls(fleet)[1]})


def test_run_asks_its_own_box_and_a_gang_both(fleet: Fleet, tmp_path: Path) -> None:
    env = {"GPU_SERVICE_ENDPOINT": urls(fleet)[1]}
    script = f"env > {tmp_path}/env"
    done = gpu_pool("run", "-q", "--gpus", str(GPUS), "--nodes", "2", "--", "sh", "-c", script, env=env)
    assert done.code == 0, done
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert seen["GPU_POOL_NODES"] == ",".join(NODES)
    assert seen["GPU_POOL_NODE_RANK"] == "1"
    assert seen["MASTER_ADDR"]
    assert "on candidate0, as the same user" in done.err
    assert "gpu-pool join" in done.err
    refused = gpu_pool("join", seen["GPU_POOL_LEASE_ID"], "--", "true", env=env)
    assert (refused.code, "not active" in refused.err) == (1, True), refused
    alone = gpu_pool("run", "--nodes", "2", "--gpus", "1", "--env", "X", "--", "true", env=env)
    assert "--env needs --ssh" in alone.err


async def test_another_box_joins_until_the_lease_ends(fleet: Fleet, tmp_path: Path) -> None:
    told = tmp_path / "env"
    async with GPUWorkerPoolClient(urls(fleet)[0], scope="fleet", **QUICK) as client:
        held = await client.request_gpu(timeout=30, gpus=GPUS, nodes=2)
        joining = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gpu_worker_pool", "join", held.lease_id or ""),
            *("--", "sh", "-c", f"env > {told}.new; mv {told}.new {told}; sleep 1000"),
            env={**environment(None, {"GPU_SERVICE_ENDPOINT": urls(fleet)[1]})},
            stderr=asyncio.subprocess.PIPE,
        )
        await soon(told.exists, "the command has started")
        seen = dict(line.split("=", 1) for line in told.read_text().splitlines() if "=" in line)
        assert seen["CUDA_VISIBLE_DEVICES"] == held.node_envs["candidate1"]["CUDA_VISIBLE_DEVICES"]
        assert (seen["GPU_POOL_NODE_RANK"], seen["GPU_POOL_LEASE_ID"]) == ("1", held.lease_id)
        assert not held.is_lost
        await client.release_gpu(held)
        _, err = await joining.communicate()
    assert joining.returncode == 125, err
    assert b"the command is stopped" in err


def test_what_cannot_be_run_on_several_boxes_is_refused_before_a_request(fleet: Fleet) -> None:
    env = {"GPU_SERVICE_ENDPOINT": urls(fleet)[1]}
    for name, words in (
        ("NOPE", "no such variable"),
        ("PATH=2", "the name of a variable only"),
        ("", "no such variable"),
    ):
        done = called("run", "--nodes", "2", "--gpus", "99", "--ssh", "--env", name, "--", "true", env=env)
        assert (done.code, words in done.err) == (2, True), done
    inside = {**env, "GPU_POOL_LEASE_ID": "outer", "GPU_POOL_LEASE_URL": urls(fleet)[1]}
    done = gpu_pool("run", "--nodes", "2", "--", "true", env=inside)
    assert (done.code, "inside the lease outer" in done.err, "--new" in done.err) == (125, True, True), done


@pytest.fixture
def with_ssh(fleet: Fleet, tmp_path: Path) -> dict[str, str]:
    """The user's ssh is a stand-in, which runs the line here, as if the other box's server were that of its machine."""
    ssh, other = tmp_path / "ssh", urls(fleet)[0]
    ssh.write_text(
        f'#!/bin/sh\necho "$3" > {tmp_path}/host; echo "$4" > {tmp_path}/line\n'
        f'[ -z "$REFUSED" ] || {{ echo $$ > {tmp_path}/pid; until [ -e "$REFUSED" ]; do sleep 0.05; done; exit 255; }}\nunset TOLD; GPU_SERVICE_ENDPOINT={other} exec sh -c "$4"\n'
    )
    (tmp_path / "gpu-pool").write_text(f'#!/bin/sh\nexec {sys.executable} -m gpu_worker_pool "$@"\n')
    for program in (ssh, tmp_path / "gpu-pool"):
        program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {"GPU_SERVICE_ENDPOINT": urls(fleet)[1], "TOLD": str(tmp_path), "PATH": path}


@pytest.mark.parametrize(("refused", "code"), [("", 5), ("/", 255)])
def test_a_command_that_fails_on_another_box_ends_all(
    fleet: Fleet, with_ssh: dict[str, str], refused: str, code: int
) -> None:
    script = '[ "$GPU_POOL_NODE_RANK" = 1 ] || exit 5; exec sleep 1000'
    command = ("run", "-q", "--gpus", "1", "--nodes", "2", "--ssh", "--", "sh", "-c", script)
    done = gpu_pool(*command, env={**with_ssh, "REFUSED": refused})
    assert (done.code, f"the command on candidate0 ended with exit code {code}" in done.err) == (code, True), done
    until(lambda: len(free(fleet.candidates[0])) == 2 * GPUS, "all GPUs are free again")


def test_a_command_that_is_told_to_end_has_its_own_exit_code(with_ssh: dict[str, str], tmp_path: Path) -> None:
    """Ctrl-C reaches ssh too, and the other box's end is not the reason then."""
    last = "touch $TOLD/go; while kill -0 $(cat $TOLD/pid); do sleep 0.05; done 2>&-; exit 7"
    gpu_pool_pid = "$(ps -o ppid= -p $PPID)"
    script = (
        f"trap '{last}' TERM; until [ -s $TOLD/pid ]; do sleep 0.05; done; kill -TERM {gpu_pool_pid}; sleep 1000 & wait"
    )
    command = ("run", "-q", "--gpus", "1", "--nodes", "2", "--ssh", "--", "sh", "-c", script)
    done = gpu_pool(*command, env={**with_ssh, "REFUSED": str(tmp_path / "go")})
    assert (done.code, done.err) == (7, ""), done


def test_ssh_starts_the_command_on_the_other_boxes(fleet: Fleet, with_ssh: dict[str, str], tmp_path: Path) -> None:
    env = {**with_ssh, "SECRET": "it's a\nsecret-word"}
    both = 'env > "$TOLD/$GPU_POOL_NODE_RANK"; until [ -e "$TOLD/0" ] && [ -e "$TOLD/1" ]; do sleep 0.05; done'
    names = ("--env", "TOLD", "--env", "SECRET")
    done = gpu_pool("run", "--gpus", str(GPUS), "--nodes", "2", "--ssh", *names, "--", "sh", "-c", both, env=env)
    assert done.code == 0, done
    assert (tmp_path / "host").read_text().strip() == "localhost"
    assert "secret-word" not in (tmp_path / "line").read_text(), "every user can read command lines"
    assert "SECRET=it's a\nsecret-word\n" in (tmp_path / "0").read_text()
    seen = [
        dict(line.split("=", 1) for line in (tmp_path / rank).read_text().splitlines() if "=" in line) for rank in "01"
    ]
    assert len({told["GPU_POOL_LEASE_ID"] for told in seen}) == 1
    assert len({told["MASTER_ADDR"] for told in seen}) == 1
    until(lambda: len(free(fleet.candidates[0])) == 2 * GPUS, "all GPUs are free again")
