"""One owner with many small shares: what the server says at its bounds, and what callers can leave out of an answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import OFTEN, PROBLEM, get, new_id, put, queue, release, take


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    settings = {"SIMULATED_GPUS": "1", "GPU_POOL_MAX_SHARERS": "3", "GPU_POOL_MAX_LEASES_PER_OWNER": "4", **OFTEN}
    with ServerProcess(settings) as running:
        yield running


def test_a_gpu_and_an_owner_have_their_bounds_and_others_are_served(server: ServerProcess) -> None:
    shares = [take(server, owner="alice", memory_mb=10)["id"] for _ in range(3)]
    waiter = queue(server, owner="alice", memory_mb=10)
    assert "1 shared by 3 leases, which is the limit for a GPU" in waiter["reason"]
    assert [(item["code"], item["sharers"], item["limit"]) for item in waiter["obstacles"]] == [("sharers_full", 3, 3)]

    refused = put(server, new_id(), owner="alice", memory_mb=10)
    assert (refused.status, refused.headers["content-type"]) == (429, PROBLEM)
    assert "alice has 4 leases already, active or waiting, which is the limit" in refused.json["detail"]
    other = queue(server, owner="bob", memory_mb=10)

    release(server, shares[0])
    assert get(server, waiter["id"], wait_s=20)["state"] == "active"
    release(server, shares[1])
    assert get(server, other["id"], wait_s=20)["state"] == "active"
    assert server.ask("/pool?leases=0").json["leases"] == []
    brief = server.json("/pool?queue=0&leases=1&not_known=7")
    assert (len(brief["leases"]), len(brief["gpus"][0]["leases"])) == (1, 3)
    assert server.ask("/pool?leases=x").status == 422
    for lease_id in (shares[2], waiter["id"], other["id"]):
        release(server, lease_id)
