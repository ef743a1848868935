"""Groups over HTTP: what they say, who may set them, and what a bad one is told. Their rule is in tests/core."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.calls.test_lease_access import ADMIN, ALICE, TOKENS, bearer
from tests.server.leasing import OFTEN, assert_problem, release_all, take


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", "GPU_POOL_NODE": "box1", "GPU_POOL_TOKENS": TOKENS, **OFTEN}) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    for group in running.json("/groups")["groups"]:
        running.ask(f"/groups/{group['name']}", "DELETE", bearer(ADMIN))
    release_all(running, bearer(ADMIN))


def set_group(server: ServerProcess, name: str, **form: Any) -> Any:
    return server.ask(f"/groups/{name}", "PUT", bearer(ADMIN), form)


def test_a_group_is_shown_with_what_its_members_have(server: ServerProcess) -> None:
    take(server, owner="ada")

    answer = set_group(server, "vision", members=["ada", "bob"], quota=8, first_right=["box1:0-1"])
    listed = server.json("/groups")["groups"]

    assert answer.status == 200, answer
    assert listed == [{**answer.json, "warning": None}]
    assert (listed[0]["members"], listed[0]["quota"], listed[0]["held_gpus"]) == (["ada", "bob"], 8, 1.0)
    assert [gpu["gpu_id"] for gpu in listed[0]["first_right"]] == [0, 1]
    assert server.json("/pool")["groups"] == server.json("/quotas")["groups"] == listed
    assert "bob" in answer.json["warning"]
    assert [usage["owner"] for usage in server.json("/usage")["groups"]] == ["vision"]


def test_the_members_of_a_unix_group_are_its_users(server: ServerProcess) -> None:
    group = grp.getgrgid(pwd.getpwuid(0).pw_gid)

    answer = set_group(server, "admins", members=[f"@{group.gr_name}"], quota=1)

    assert answer.json["named"] == [f"@{group.gr_name}"]
    assert "root" in answer.json["members"]


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"members": []}, "members"),
        ({"members": ["@no-such-group"]}, "no Unix group no-such-group"),
        ({"members": ["ada"], "first_right": ["box1:7"]}, "No GPU here is called 'box1:7'"),
        ({"members": ["ada"], "first_right": ["box1:1"]}, "group speech already has first right on box1:1"),
        ({"members": ["ada"], "quota": -1}, "quota"),
    ],
)
def test_a_group_that_cannot_be_is_refused_and_nothing_is_changed(
    server: ServerProcess, form: dict[str, Any], why: str
) -> None:
    set_group(server, "speech", members=["bob"], first_right=["1"])
    before = server.json("/groups")["groups"]

    assert_problem(set_group(server, "vision", **form), 422, why)

    assert server.json("/groups")["groups"] == before


def test_only_an_administrator_sets_and_removes_groups(server: ServerProcess) -> None:
    assert server.ask("/groups/vision", "PUT", bearer(ALICE), {"members": ["alice"], "quota": 1}).status == 403
    set_group(server, "vision", members=["ada"], quota=1)
    assert server.ask("/groups/vision", "DELETE", bearer(ALICE)).status == 403
    assert server.ask("/groups/vision", "DELETE", bearer(ADMIN)).json["groups"] == []
    assert server.ask("/groups/vision", "DELETE", bearer(ADMIN)).status == 404
