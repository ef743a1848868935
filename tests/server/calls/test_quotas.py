"""Quotas over HTTP: what they say, who may set them, and what a bad one is told. Their rule is in tests/core/queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.calls.test_lease_access import ADMIN, ALICE, TOKENS, bearer
from tests.server.leasing import OFTEN, assert_problem, put, queue, release_all, take


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    settings = {"SIMULATED_GPUS": "2", "GPU_POOL_FAIR_SHARE": "true", "GPU_POOL_TOKENS": TOKENS, **OFTEN}
    with ServerProcess(settings) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    for quota in running.json("/quotas")["quotas"]:
        running.ask(f"/quotas/{quota['owner']}", "DELETE", bearer(ADMIN))
    release_all(running, bearer(ADMIN))


def set_quota(server: ServerProcess, owner: str, **form: Any) -> dict[str, Any]:
    answer = server.ask(f"/quotas/{owner}", "PUT", bearer(ADMIN), form)
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json
    return found


def quotas(server: ServerProcess) -> dict[str, dict[str, Any]]:
    return {quota["owner"]: quota for quota in server.json("/quotas")["quotas"]}


def test_a_quota_is_shown_with_the_use_of_its_owner(server: ServerProcess) -> None:
    take(server, owner="ada")
    take(server, owner="bob")
    queue(server, owner="bob")

    shown = set_quota(server, "ada", gpus=1, weight=2, max_priority=5, max_time_limit_s=3600, max_queued=3)
    set_quota(server, "*", gpus=0)
    answer = server.json("/quotas")

    assert shown == next(quota for quota in answer["quotas"] if quota["owner"] == "ada") | {
        "used_gpu_hours": shown["used_gpu_hours"],
        "share_factor": shown["share_factor"],
    }
    assert (shown["gpus"], shown["weight"]) == (1, 2.0)
    assert (shown["max_priority"], shown["max_time_limit_s"], shown["max_queued"]) == (5, 3600.0, 3)
    assert (shown["held_gpus"], shown["queued"]) == (1.0, 0)
    assert 0 < shown["share_factor"] < 1
    assert (answer["fair_share"], answer["server_id"]) == (True, server.json("/pool")["server_id"])
    everybody = next(quota for quota in answer["quotas"] if quota["owner"] == "*")
    assert (everybody["gpus"], everybody["held_gpus"]) == (0, None)
    (bob,) = [other for other in answer["others"] if other["owner"] == "bob"]
    assert (bob["gpus"], bob["held_gpus"], bob["queued"]) == (0, 1.0, 1), "the quota of * is bob's"


@pytest.mark.parametrize(
    ("owner", "form", "word"),
    [
        ("ada", {"gpus": -1}, "gpus"),
        ("ada", {"gpus": 1.5}, "gpus"),
        ("ada", {"ceiling": 2}, "ceiling"),
        ("ada", {"weight": 0}, "weight"),
        ("ada", {"max_time_limit_s": 0.5}, "max_time_limit_s"),
        ("ada", {"max_priority": 10**9}, "max_priority"),
        ("ada", {"gpu": 1}, "gpu"),
        ("ada", {"max_queued": 0}, "gpus to 0"),
        ("a%20da", {"gpus": 1}, "without blanks"),
        ("a%0Ada", {"gpus": 1}, "printable"),
        ("a" * 300, {"gpus": 1}, "at most"),
    ],
)
def test_a_bad_quota_changes_nothing_and_is_told_what_is_wrong(
    server: ServerProcess, owner: str, form: dict[str, Any], word: str
) -> None:
    assert_problem(server.ask(f"/quotas/{owner}", "PUT", bearer(ADMIN), form), 422, word)
    assert quotas(server) == {}


def test_a_user_may_lower_its_priority_and_raises_it_only_as_an_operator_allows(server: ServerProcess) -> None:
    def ask(token: str, priority: int) -> Any:
        return put(server, f"of-{priority}", headers=bearer(token), priority=priority)

    assert_problem(ask(ALICE, 1_000_000), 422, "priority is 1000000", "0 or less", "--max-priority 1000000")
    assert ask(ALICE, -5).status == 201
    assert ask(ADMIN, 7).status == 201
    set_quota(server, "alice", max_priority=10)
    assert ask(ALICE, 10).status == 202
    assert_problem(ask(ALICE, 11), 422, "allows at most 10")
