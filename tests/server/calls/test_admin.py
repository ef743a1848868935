"""What the operator may do, over HTTP. Who may is in test_lease_access.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import (
    OFTEN,
    LongPoll,
    assert_problem,
    get,
    gpu_states,
    held,
    new_id,
    put,
    queue,
    release,
    release_all,
    renew,
    take,
    wait_until_free,
)


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", "GPU_POOL_NODE": "box1", **OFTEN}) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    for index in (0, 1):
        running.ask(f"/admin/gpus/{index}/undrain", "POST")
    for name in running.json("/pool")["ignored_processes"]:
        running.ask(f"/admin/ignored-processes/{name}", "DELETE")
    release_all(running)


def act(server: ServerProcess, path: str, method: str = "POST", body: Any = None) -> dict[str, Any]:
    answer = server.ask(f"/admin/{path}", method, body=body)
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json
    return found


def uuid_of(server: ServerProcess, index: int) -> str:
    uuid: str = server.json("/pool")["gpus"][index]["uuid"]
    return uuid


# --- revoking --------------------------------------------------------------------------------------------------------


def test_a_lease_is_taken_away_and_its_holder_hears_of_it(server: ServerProcess) -> None:
    lease = take(server, gpus=2)
    waiter = queue(server)["id"]
    with LongPoll(server, f"/leases/{waiter}?wait_s=25") as poll:
        poll.held()
        revoked = act(server, f"leases/{lease['id']}/revoke")
        assert poll.grant().json["state"] == "active", "the next one has it at once"

    assert (revoked["state"], revoked["end_reason"]) == ("ended", "revoked")
    assert revoked["gpus"] == lease["gpus"]
    assert renew(server, lease["id"], waiter)["lost"] == [
        {"id": lease["id"], "reason": "revoked", "by": user_name(), "note": None}
    ]
    assert get(server, lease["id"])["end_reason"] == "revoked"
    assert release(server, lease["id"])["end_reason"] == "revoked", "giving it back changes nothing of that"
    assert act(server, f"leases/{lease['id']}/revoke") == revoked


# --- out of service --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["index", "uuid"])
def test_a_gpu_is_taken_out_of_service_and_put_back(server: ServerProcess, by: str) -> None:
    name = "0" if by == "index" else uuid_of(server, 0)
    gpu = act(server, f"gpus/{name}/drain", body={"reason": "fan is broken"})

    assert (gpu["gpu_id"], gpu["state"], gpu["is_out_of_service"]) == (0, "out_of_service", True)
    assert "fan is broken" in gpu["reason"]
    assert gpu_states(server) == ["out_of_service", "free"]
    assert take(server)["gpus"][0]["gpu_id"] == 1
    waiter = queue(server)
    assert [item["code"] for item in waiter["obstacles"]] == ["excluded", "leased"]
    assert "fan is broken" in waiter["reason"]

    with LongPoll(server, f"/leases/{waiter['id']}?wait_s=25") as poll:
        poll.held()
        back = act(server, f"gpus/{name}/undrain")
        assert back["is_out_of_service"] is False
        assert poll.grant().json["gpus"][0]["gpu_id"] == 0
    assert act(server, f"gpus/{name}/undrain")["is_out_of_service"] is False, "again is harmless"


def test_drains_that_make_no_sense(server: ServerProcess) -> None:
    before = gpu_states(server)
    for gpu in ("7", "-1", "GPU-nothing", "%00", "0x0", "%C3%BC", "a/b"):
        assert_problem(server.ask(f"/admin/gpus/{gpu}/drain", "POST"), 404, "index or UUID")
        assert_problem(server.ask(f"/admin/gpus/{gpu}/undrain", "POST"), 404)
    for body, status in (
        ({"why": "x"}, 422),
        ({"reason": 5}, 422),
        ({"reason": "x" * 201}, 422),
        ({"reason": "a\nb"}, 422),
        (b"{", 400),
        (b" " * 70_000, 413),
    ):
        assert_problem(server.ask("/admin/gpus/0/drain", "POST", body=body), status)
    assert_problem(server.ask("/admin/gpus/0/drain?force=1", "POST"), 422, "force")
    assert_problem(server.ask("/admin/gpus/0/drain"), 405)
    assert_problem(server.ask("/admin/gpus/drain", "POST"), 404)
    assert_problem(server.ask("/admin/"), 404)
    assert gpu_states(server) == before


# --- left out of the reckoning ---------------------------------------------------------------------------------------


def test_processes_are_left_out_and_counted_again(server: ServerProcess) -> None:
    assert act(server, "ignored-processes/Xorg", "PUT") == {"ignored_processes": ["Xorg"]}
    assert act(server, "ignored-processes/gnome%20shell", "PUT") == {"ignored_processes": ["Xorg", "gnome shell"]}
    assert act(server, "ignored-processes/Xorg", "PUT")["ignored_processes"] == ["Xorg", "gnome shell"]
    assert server.json("/pool")["ignored_processes"] == ["Xorg", "gnome shell"]
    assert act(server, "ignored-processes/Xorg", "DELETE") == {"ignored_processes": ["gnome shell"]}
    assert act(server, "ignored-processes/gnome%20shell", "DELETE") == {"ignored_processes": []}
    assert act(server, "ignored-processes/never", "DELETE") == {"ignored_processes": []}
    for name in ("x" * 65, "%20", "a%0Ab", "%00"):
        assert_problem(server.ask(f"/admin/ignored-processes/{name}", "PUT"), 422, "process name")


# --- through a crash -------------------------------------------------------------------------------------------------


def test_all_of_it_is_there_after_a_crash() -> None:
    with ServerProcess({"SIMULATED_GPUS": "2"}) as server:
        act(server, "gpus/1/drain", body={"reason": "kept for Friday"})
        act(server, "ignored-processes/Xorg", "PUT")
        revoked = act(server, f"leases/{take(server)['id']}/revoke")
        server.restart()

        pool = server.json("/pool")
        assert [gpu["is_out_of_service"] for gpu in pool["gpus"]] == [False, True]
        assert "kept for Friday" in pool["gpus"][1]["reason"]
        assert pool["ignored_processes"] == ["Xorg"]
        assert act(server, f"leases/{revoked['id']}/revoke") == revoked
        assert put(server, new_id(), wait_s=10).json["gpus"][0]["gpu_id"] == 0
        queue(server)
        act(server, "gpus/1/undrain")
        act(server, "ignored-processes/Xorg", "DELETE")
        server.restart()

        assert server.json("/pool")["ignored_processes"] == []
        assert len(held(server)) == 2
        release_all(server)
        wait_until_free(server)
