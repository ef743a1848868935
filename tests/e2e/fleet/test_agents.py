"""Every box keeps the leases on its GPUs. Two boxes can lead, one cannot; each is killed, and so is the database."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.fleet.fleet import GPUS, Box, Candidate, Fleet, fleet_of, until
from tests.e2e.worker import identity
from tests.ledger.postgres.server import PostgresServer

KEY = "a-key-that-is-long-enough"


class Boxes:
    """Two candidates and a box that cannot lead."""

    def __init__(self, fleet: Fleet, agent: Box) -> None:
        self.fleet = fleet
        self.agent = agent
        self.all = [*fleet.candidates, agent]

    def pool(self) -> Any:
        return self.fleet.leader().json("/pool")

    def request(self, lease_id: str, **form: object) -> Any:
        """A lease of a remote holder, by the leader."""
        status, lease = self.fleet.leader().call("PUT", f"/leases/{lease_id}", {"ttl_s": 5.0, **form})
        assert status in {200, 201}, lease
        return lease

    def on(self, box: Box, lease_id: str, **form: object) -> Any:
        """A lease on the first GPU of this box."""
        return self.request(lease_id, among=[f"{box.node}:0"], **form)

    def state(self, lease_id: str) -> Any:
        status, lease = self.fleet.leader().call("GET", f"/leases/{lease_id}")
        return (lease["state"], lease["end_reason"]) if status == 200 else (status, lease)

    def release(self, *lease_ids: str) -> None:
        for lease_id in lease_ids:
            assert self.fleet.leader().call("DELETE", f"/leases/{lease_id}")[0] == 200


def renewed(box: Box, *lease_ids: str, **form: object) -> bool:
    status, answer = box.call("POST", "/leases/renew", {"ids": lease_ids, **form})
    return status == 200 and {each["id"] for each in answer["renewed"]} == set(lease_ids)


def are_up(boxes: Boxes) -> bool:
    """Whether all GPUs of all boxes can be granted."""
    return sum(gpu["state"] == "free" for gpu in boxes.pool()["gpus"]) == GPUS * len(boxes.all)


@pytest.fixture(scope="module")
def boxes(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    postgres.create_database("agents")
    folder = tmp_path_factory.mktemp("fleet")
    with fleet_of(postgres, "agents", folder, size=2, GPU_POOL_FLEET_KEY=KEY) as fleet:
        listed = ",".join(candidate.url for candidate in fleet.candidates)
        with Box(listed, folder / "agent", GPU_POOL_FLEET_KEY=KEY) as agent:
            found = Boxes(fleet, agent)
            until(lambda: are_up(found), "all boxes are up")
            yield found


def test_the_gpus_of_each_box_are_granted_and_used(boxes: Boxes) -> None:
    for box in boxes.all:
        lease = boxes.on(box, f"on-{box.node}")
        assert [gpu["node"] for gpu in lease["gpus"]] == [box.node]
        # The box itself shows that its GPU is in use.
        until(lambda box=box: box.json("/gpu/stats")["gpus"][0]["memory_used_mb"] > 1000, "its GPU is used")
    boxes.release(*(f"on-{box.node}" for box in boxes.all))
    until(lambda: are_up(boxes), "all GPUs are free again")
