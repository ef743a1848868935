"""Processes outside the pool, as a running server and its commands show them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import gpu_pool
from tests.server.leasing import get

BOB = {"pid": 4_000_123, "name": "train.py", "user": "bob", "memory_mb": 59_392, "utilization_percent": 60}
NAMED = "in use outside the pool: train.py of bob (pid 4000123), 58.0 GiB, 60 % busy"


@pytest.fixture(scope="module")
def outsiders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("outsiders") / "outsiders.json"
    file.write_text(json.dumps({"0": [BOB]}))
    return file


@pytest.fixture(scope="module")
def server(outsiders: Path) -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", "SIMULATED_OUTSIDERS": str(outsiders)}) as server:
        yield server


def test_a_stranger_keeps_a_gpu_from_an_exclusive_lease_and_is_named_everywhere(
    server: ServerProcess, outsiders: Path
) -> None:
    first, _ = server.json("/pool")["gpus"]
    assert (first["state"], first["reason"], first["verdict"]["code"]) == ("outside", NAMED, "in_use_outside")
    assert [(process["user"], process["is_outside"]) for process in first["processes"]] == [("bob", True)]

    granted = server.ask("/leases/one", "PUT", body={}).json
    assert [gpu["gpu_id"] for gpu in granted["gpus"]] == [1]
    waiting = server.ask("/leases/two", "PUT", body={}).json
    assert NAMED in waiting["reason"]
    assert re.search(r'state="outside",uuid="[^"]*"} 1\.0', server.ask("/metrics").body.decode())

    shown = [
        gpu_pool(*words, "--endpoint", server.url, cwd=outsiders.parent, env={"COLUMNS": "400"}).out
        for words in (("status",), ("explain", "two"), ("doctor",))
    ]
    assert [NAMED in " ".join(text.split()) for text in shown] == [True, True, True]
    own = server.ask("/leases/three", "PUT", body={"memory_threshold_percent": 90}).json
    assert (own["state"], [gpu["gpu_id"] for gpu in own["gpus"]]) == ("active", [0])

    server.ask("/leases/three", "DELETE")
    temporary = outsiders.with_suffix(".new")
    temporary.write_text("{}")
    temporary.replace(outsiders)

    assert get(server, "two", wait_s=30)["state"] == "active"
