"""Leases inside a lease, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import (
    OFTEN,
    assert_problem,
    eventually,
    get,
    new_id,
    put,
    queue,
    release,
    take,
    wait_until_free,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", **OFTEN}) as server:
        yield server


def test_leases_inside_a_lease_use_its_gpu_one_after_the_other(server: ServerProcess) -> None:
    outer = take(server, owner="ada")
    inner = take(server, owner="ada", parent=outer["id"])
    assert (inner["parent"], inner["gpus"], inner["env"]) == (outer["id"], outer["gpus"], outer["env"])
    waiter = queue(server, owner="ada", parent=outer["id"])
    assert waiter["position"] == 1
    assert f"Position 1 of 1 inside lease {outer['id']}" in waiter["reason"]
    assert [obstacle["lease_ids"] for obstacle in waiter["obstacles"]] == [[inner["id"]]]

    pool = server.json("/pool")
    assert sorted(len(gpu["leases"]) for gpu in pool["gpus"]) == [0, 1]
    assert {lease["id"]: lease["parent"] for lease in (*pool["leases"], *pool["queue"])} == {
        outer["id"]: None,
        inner["id"]: outer["id"],
        waiter["id"]: outer["id"],
    }
    # What is inside a lease is part of it, and is not counted beside it.
    assert server.json("/usage")["total"]["running"] == 1
    assert sum(len(gpu["spans"]) for gpu in server.json("/timeline")["gpus"]) == 1
    metrics = server.ask("/metrics").body.decode()
    assert "gpupool_leases_active 1.0" in metrics
    assert "gpupool_leases_queued 0.0" in metrics

    release(server, inner["id"])
    assert get(server, waiter["id"], wait_s=10.0)["state"] == "active"
    server.restart()
    assert get(server, waiter["id"])["state"] == "active"
    release(server, outer["id"])
    ended = get(server, waiter["id"])
    assert (ended["state"], ended["end_reason"]) == ("ended", "released")
    wait_until_free(server)
    assert server.json("/usage")["total"]["leases"] == 1


def test_a_parent_that_cannot_be_one_is_refused_and_nothing_is_taken(server: ServerProcess) -> None:
    outer = take(server, owner="ada")
    for form, words in (
        ({"parent": "never-heard-of"}, ("never-heard-of", "not known", "--new")),
        ({"parent": outer["id"], "gpus": 2}, ("not 2 GPUs", "--new")),
        ({"parent": "not an id"}, ("parent", "lease id")),
        ({"parent": 7}, ("parent", "not a text")),
    ):
        assert_problem(put(server, new_id(), owner="ada", **form), 422, *words)
    release(server, outer["id"])
    assert_problem(put(server, new_id(), owner="ada", parent=outer["id"]), 422, "has ended (released)")
    wait_until_free(server)


def test_a_lease_inside_a_lease_ends_with_it_and_says_so(server: ServerProcess) -> None:
    outer = take(server, owner="ada", time_limit_s=30)
    inner = take(server, owner="ada", parent=outer["id"], time_limit_s=3000)

    assert inner["ends_at"] == outer["ends_at"]
    release(server, inner["id"])
    own = take(server, owner="ada", parent=outer["id"], time_limit_s=2)
    assert own["ends_at"] < outer["ends_at"]
    release(server, outer["id"])
    warned = take(server, owner="ada", time_limit_s=2)
    inside = take(server, owner="ada", parent=warned["id"])
    eventually(lambda: get(server, inside["id"])["warning"] is not None, "the lease inside is warned")
    assert get(server, inside["id"])["warning"]["reason"] == "time_limit"
    release(server, warned["id"])
    wait_until_free(server)
