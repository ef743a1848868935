"""What `gpu-pool doctor` says of a real fleet, and of one that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.cli.doctor.server import judge_boxes
from gpu_worker_pool.wire.pool import BoxView, FleetList
from tests.cli.in_process import called
from tests.ledger.postgres.server import PostgresServer
from tests.server.running import free_port

from .fleet import GPUS, Candidate, fleet_of, until

KEY = "a-key-that-is-long-enough"


@pytest.fixture(scope="module")
def box(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Candidate]:
    postgres.create_database("doctor")
    with fleet_of(postgres, "doctor", tmp_path_factory.mktemp("fleet"), 1, GPU_POOL_FLEET_KEY=KEY) as found:
        (box,) = found.candidates
        until(lambda: box.json("/health")["fleet"]["leader"] and len(box.json("/pool")["gpus"]) == GPUS, "it leads")
        yield box


def findings(box: Candidate, folder: Path, **changed: str) -> dict[str, list[dict[str, Any]]]:
    """What is found of the fleet, by check."""
    settings = {
        name: box.env[name] for name in ("GPU_POOL_NODE", "GPU_POOL_FLEET", "GPU_POOL_FLEET_KEY", "HOST", "PORT")
    }
    env = {**settings, "GPU_POOL_STATE_DIR": str(folder), "GPU_SERVICE_ENDPOINT": box.url, **changed}
    done = called("doctor", "--json", env=env)
    assert "secret-word" not in done.out + done.err
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.out)["findings"]:
        if finding["check"].startswith("fleet-"):
            found.setdefault(finding["check"], []).append(finding)
    return found


def problems(found: dict[str, list[dict[str, Any]]]) -> str:
    return "; ".join(item["message"] for items in found.values() for item in items if item["status"] == "problem")


def test_a_healthy_box_has_no_problem(box: Candidate, postgres: PostgresServer, tmp_path: Path) -> None:
    found = findings(box, tmp_path)
    assert set(found) == {"fleet-settings", "fleet-database", "fleet-boxes"}
    assert problems(found) == ""
    assert f"PostgreSQL {postgres.execute('SHOW server_version').split()[0]}, " in found["fleet-database"][0]["message"]
    # Of one machine only: the others would be led to themselves.
    assert "on each machine means itself" in found["fleet-settings"][1]["message"]


def test_a_fleet_that_cannot_be_used_is_a_problem(box: Candidate, tmp_path: Path) -> None:
    assert "a key needs at least" in problems(findings(box, tmp_path, GPU_POOL_FLEET_KEY="short"))
    nowhere = "postgresql://admin:secret-word@127.0.0.1:1/none"
    assert "127.0.0.1:1" in problems(findings(box, tmp_path, GPU_POOL_FLEET=nowhere))
    assert "GPU_POOL_FLEET" in problems(findings(box, tmp_path, GPU_POOL_FLEET="mysql://admin:secret-word@host/none"))
    twin = findings(box, tmp_path, GPU_POOL_FLEET_ADDRESS="http://gpu-07:8000")
    assert "is also a box of the fleet named candidate0" in problems(twin)


def test_a_candidate_that_does_not_run_asks_the_leader_of_the_database(box: Candidate, tmp_path: Path) -> None:
    before_its_start = {"GPU_POOL_NODE": "next", "PORT": str(free_port())}
    found = findings(box, tmp_path, **before_its_start)
    assert [item["message"] for item in found["fleet-boxes"]] == ["1 boxes, 1 in contact, led by candidate0"]


def test_boxes_are_judged_by_state_and_version() -> None:
    boxes = (
        BoxView(node="a", url="http://a", state="up", version="9.0.0", is_leader=True),
        BoxView(node="b", url="http://b", state="unknown"),
        BoxView(node="c", url="http://c", state="up", version="1.0.0"),
    )
    found = [
        (item.status, item.message)
        for item in judge_boxes(FleetList(id="x", epoch=1, leader="a", boxes=boxes), "d", "")
    ]
    assert ("ok", "3 boxes, 2 in contact, led by a") in found
    assert ("warning", "the boxes have different versions: 1.0.0 on c; 9.0.0 on a") in found
    assert ("warning", "there is no contact with b; nothing is granted there") in found
