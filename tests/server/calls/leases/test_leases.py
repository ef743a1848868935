"""A lease as a client sees it over HTTP, at a server in a process of its own: granted, asked for again, given back, listed."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from tests.server.calls.leases.box import A100, FIELDS, GPUS, NODE, T4
from tests.server.leasing import (
    LongPoll,
    assert_problem,
    eventually,
    get,
    held,
    new_id,
    put,
    queue,
    queued,
    release,
    take,
    wait_until_free,
)


def is_recent(text: str) -> bool:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", text), text
    return abs((datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds()) < 60


# --- granted ---------------------------------------------------------------------------------------------------------


def test_a_granted_lease_reads_as_documented(server: ServerProcess) -> None:
    lease_id = new_id()
    form: dict[str, Any] = {
        "model": T4,
        "priority": 3,
        "ttl_s": 20,
        "worker_id": "trainer-7",
        "owner": "ann",
        "host": "far-away",
        "pid": 4711,
        "labels": {"job": "mnist"},
    }
    answer = put(server, lease_id, **form)

    assert answer.status == 201
    assert answer.headers["content-type"] == "application/json"
    lease = answer.json
    assert lease.keys() >= FIELDS
    (gpu,) = lease["gpus"]
    assert gpu.keys() == {"node", "gpu_id", "uuid", "name"}
    assert (gpu["node"], gpu["gpu_id"]) == (NODE, 2)
    assert gpu["name"] == "Simulated Tesla T4"
    assert gpu["uuid"] == server.json("/gpu/stats")["gpus"][2]["uuid"]
    assert lease["env"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2"}
    told = {key: lease[key] for key in ("priority", "ttl_s", "worker_id", "owner", "host", "pid", "labels")}
    assert told == {key: form[key] for key in told}
    assert (lease["id"], lease["state"], lease["reason"]) == (lease_id, "active", None)
    assert (lease["position"], lease["memory_mb"], lease["is_local"]) == (None, None, False)
    assert lease["fence"] >= 1
    assert 15 < lease["expires_in_s"] <= 20
    assert is_recent(lease["requested_at"])
    assert is_recent(lease["granted_at"])
    assert (lease["ended_at"], lease["end_reason"]) == (None, None)


def test_everything_may_be_left_out_and_so_may_the_body(server: ServerProcess) -> None:
    with_empty_object = take(server)
    without_body = server.ask(f"/leases/{new_id()}", "PUT")

    assert without_body.status == 201
    for lease in (with_empty_object, without_body.json):
        assert (lease["ttl_s"], lease["priority"], len(lease["gpus"])) == (60, 0, 1)
        assert lease["owner"] == user_name()
        assert lease["worker_id"] is lease["host"] is lease["pid"] is None


def test_no_two_exclusive_leases_share_a_gpu_and_every_fence_is_higher(server: ServerProcess) -> None:
    leases = [take(server) for _ in range(GPUS)]

    assert {lease["gpus"][0]["gpu_id"] for lease in leases} == {0, 1, 2}
    fences = [lease["fence"] for lease in leases]
    assert fences == sorted(set(fences))
    again = take_again(server, leases[0]["id"])
    assert again["fence"] > fences[-1]


def take_again(server: ServerProcess, lease_id: str) -> dict[str, Any]:
    release(server, lease_id)
    lease = put(server, new_id(), wait_s=10)
    assert lease.status == 201, lease
    found: dict[str, Any] = lease.json
    return found


def test_of_many_who_ask_at_once_each_gpu_goes_to_one(server: ServerProcess) -> None:
    ids = [new_id("crowd") for _ in range(32)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda lease_id: put(server, lease_id), ids))

    granted = [answer.json for answer in answers if answer.status == 201]
    assert sorted(lease["gpus"][0]["gpu_id"] for lease in granted) == [0, 1, 2]
    assert len({lease["fence"] for lease in granted}) == GPUS
    assert sum(answer.status == 202 for answer in answers) == len(ids) - GPUS
    assert held(server) == {lease["id"] for lease in granted}
    assert len(queued(server)) == len(ids) - GPUS


def test_of_many_who_ask_at_once_with_one_id_all_get_the_same(server: ServerProcess) -> None:
    lease_id = new_id()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: put(server, lease_id, wait_s=5), range(16)))

    assert sorted(answer.status for answer in answers) == [200] * 15 + [201]
    assert len({answer.json["fence"] for answer in answers}) == 1
    assert held(server) == {lease_id}


def test_uuids_are_named_on_request(server: ServerProcess) -> None:
    lease_id = new_id()
    answer = put(server, lease_id, query="?devices=uuid", gpus=2, model=A100)

    uuids = [gpu["uuid"] for gpu in sorted(answer.json["gpus"], key=lambda gpu: gpu["gpu_id"])]
    assert answer.json["env"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(uuids)}
    assert get(server, lease_id, devices="uuid")["env"] == answer.json["env"]
    assert get(server, lease_id)["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert_problem(server.ask(f"/leases/{lease_id}?devices=names"), 422, "devices", "index", "uuid")


def test_a_model_is_a_word_or_a_pattern(server: ServerProcess) -> None:
    assert take(server, model="t4")["gpus"][0]["gpu_id"] == 2
    assert take(server, model="*a100*80gb")["gpus"][0]["gpu_id"] in {0, 1}


# --- asking again ----------------------------------------------------------------------------------------------------


def test_the_same_again_is_the_same_lease(server: ServerProcess) -> None:
    first = take(server, "once", gpus=2, labels={"a": "1", "b": "2"})
    again = put(server, "once", gpus=2, labels={"b": "2", "a": "1"}, wait_s=2.5)

    assert again.status == 200
    assert again.json["gpus"] == first["gpus"]
    assert again.json["fence"] == first["fence"]
    assert held(server) == {"once"}


def test_a_queued_one_asked_for_again_keeps_its_place(server: ServerProcess) -> None:
    take(server, gpus=GPUS)
    first, second = queue(server), queue(server)
    again = put(server, first["id"], wait_s=0.05)

    assert again.status == 200
    assert (again.json["state"], again.json["position"]) == ("queued", 1)
    assert queued(server) == [first["id"], second["id"]]


@pytest.mark.parametrize(
    "other",
    [
        {"gpus": 2},
        {"memory_mb": 100},
        {"model": A100},
        {"priority": 1},
        {"ttl_s": 31},
        {"memory_threshold_percent": 50},
        {"utilization_threshold_percent": 50},
        {"worker_id": "somebody-else"},
        {"owner": "else"},
        {"host": "elsewhere"},
        {"labels": {"a": "b"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_the_same_id_with_other_wishes_is_a_conflict(server: ServerProcess, other: dict[str, Any]) -> None:
    lease = take(server)

    assert_problem(put(server, lease["id"], **other), 409, lease["id"], "other wishes")
    now = get(server, lease["id"])
    assert {**now, "expires_in_s": 0} == {**lease, "expires_in_s": 0}


def test_an_answer_that_was_lost_costs_nothing(server: ServerProcess) -> None:
    lease_id = new_id()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"PUT /leases/{lease_id} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
        connection.sendall(head.encode() + b"{}")
        eventually(lambda: lease_id in held(server), "it was granted though nobody listened")

    again = put(server, lease_id)
    assert again.status == 200
    assert again.json["state"] == "active"
    assert held(server) == {lease_id}


def test_what_has_ended_is_not_begun_anew(server: ServerProcess) -> None:
    lease = take(server)
    ended = release(server, lease["id"])
    wait_until_free(server)

    again = put(server, lease["id"])
    assert again.status == 200
    assert again.json == ended
    assert held(server) == set()
    assert_problem(put(server, lease["id"], gpus=2), 409)


# --- giving back -----------------------------------------------------------------------------------------------------


def test_giving_back_twice_is_answered_the_same_to_the_byte(server: ServerProcess) -> None:
    lease = take(server, gpus=2, owner="ann")
    path = f"/leases/{lease['id']}"
    first, second = server.ask(path, "DELETE"), server.ask(path, "DELETE")
    wait_until_free(server)
    third = server.ask(path, "DELETE")

    assert first.status == second.status == third.status == 200
    assert first.body == second.body == third.body
    ended = first.json
    assert ended.keys() >= FIELDS
    assert (ended["state"], ended["end_reason"], ended["reason"]) == ("ended", "released", "released")
    assert is_recent(ended["ended_at"])
    assert (ended["gpus"], ended["fence"], ended["granted_at"]) == (lease["gpus"], lease["fence"], lease["granted_at"])
    assert ended["env"] == {}
    assert ended["expires_in_s"] is None
    assert get(server, lease["id"]) == ended


def test_leaving_the_queue(server: ServerProcess) -> None:
    holder = take(server, gpus=GPUS)
    first, second = queue(server), queue(server)
    path = f"/leases/{first['id']}"

    left, again = server.ask(path, "DELETE"), server.ask(path, "DELETE")
    assert left.body == again.body
    assert (left.json["state"], left.json["end_reason"]) == ("ended", "cancelled")
    assert (left.json["gpus"], left.json["fence"], left.json["granted_at"]) == ([], None, None)
    assert get(server, second["id"])["position"] == 1
    release(server, holder["id"])
    assert get(server, second["id"], wait_s=10)["state"] == "active"
    assert get(server, first["id"])["state"] == "ended"


def test_whoever_waits_is_answered_when_it_is_cancelled(server: ServerProcess) -> None:
    take(server, gpus=GPUS)
    waiter = queue(server)
    with LongPoll(server, f"/leases/{waiter['id']}?wait_s=25") as poll:
        release(server, waiter["id"])
        assert poll.answer().json["end_reason"] == "cancelled"


def test_what_is_not_there(server: ServerProcess) -> None:
    assert_problem(server.ask("/leases/never-heard-of"), 404, "never-heard-of", "PUT")
    assert_problem(server.ask("/leases/never-heard-of", "DELETE"), 404, "never-heard-of")
    assert_problem(server.ask("/leases/never-heard-of?wait_s=20"), 404)


@pytest.mark.parametrize(
    ("method", "path", "possible"),
    [
        ("POST", "/leases", {"GET"}),
        ("DELETE", "/leases", {"GET"}),
        ("PATCH", "/leases/x", {"PUT", "GET", "DELETE"}),
        ("POST", "/leases/x", {"PUT", "GET", "DELETE"}),
        ("PUT", "/pool", {"GET"}),
    ],
)
def test_another_method_is_told_which_ones_there_are(
    server: ServerProcess, method: str, path: str, possible: set[str]
) -> None:
    answer = server.ask(path, method)

    assert_problem(answer, 405, method)
    assert set(answer.headers["allow"].replace(" ", "").split(",")) - {"HEAD", "OPTIONS"} == possible


# --- everything at a glance ------------------------------------------------------------------------------------------


def test_the_list_and_the_pool_show_what_is_live(server: ServerProcess) -> None:
    ended = take(server)["id"]
    release(server, ended)
    wait_until_free(server)
    holder, waiter = take(server, gpus=2, model=A100)["id"], queue(server, model=A100)["id"]
    listed, pool = server.json("/leases"), server.json("/pool")

    assert listed["node"] == pool["node"] == NODE
    assert {lease["id"]: lease["state"] for lease in listed["leases"]} == {holder: "active", waiter: "queued"}
    assert [lease["id"] for lease in pool["leases"]] == [holder]
    assert [lease["id"] for lease in pool["queue"]] == [waiter]
    assert [(gpu["gpu_id"], gpu["state"], gpu["leases"]) for gpu in pool["gpus"]] == [
        (0, "leased", [holder]),
        (1, "leased", [holder]),
        (2, "free", []),
    ]
    assert all(gpu["reason"] for gpu in pool["gpus"])
    assert pool["thresholds"] == {"memory_percent": 80, "utilization_percent": 90}
    assert (pool["can_grant"], pool["trouble"]) == (True, None)
    assert pool["source"] == "simulated"


def test_head_is_get_without_the_body(server: ServerProcess) -> None:
    lease = take(server)["id"]
    for path in (f"/leases/{lease}", "/leases", "/pool"):
        head, got = server.ask(path, "HEAD"), server.ask(path)
        assert head.status == got.status == 200
        assert head.body == b""
        assert head.headers["content-type"] == got.headers["content-type"]
        # A reading that comes between the two changes the body.
        eventually(partial(_head_has_the_length_of_get, server, path), f"HEAD of {path} has the length of GET")
    assert server.ask("/leases/never-heard-of", "HEAD").status == 404


def _head_has_the_length_of_get(server: ServerProcess, path: str) -> bool:
    return int(server.ask(path, "HEAD").headers["content-length"]) == len(server.ask(path).body)


def test_the_home_page_and_the_document_list_these_calls(server: ServerProcess) -> None:
    endpoints = server.json("/")["endpoints"]
    paths = server.json("/openapi.json")["paths"]

    reading = {"/leases", "/pool", "/usage", "/timeline", "/events"}
    assert endpoints.keys() >= {"/leases/{id}", "/leases/renew", *reading}
    assert paths["/leases/{lease_id}"].keys() == {"put", "get", "delete"}
    assert paths["/leases/{lease_id}"]["put"]["responses"].keys() >= {"200", "201", "202", "409", "422", "429", "503"}
    assert paths["/leases/renew"].keys() == {"post"}
    assert {path: list(paths[path]) for path in reading} == {path: ["get"] for path in reading}
    assert {path for path in paths if path.startswith("/admin")} == {
        "/admin/leases/{lease_id}/revoke",
        "/admin/gpus/{gpu}/drain",
        "/admin/gpus/{gpu}/undrain",
        "/admin/ignored-processes/{name}",
        "/admin/tokens",
        "/admin/tokens/{digest}",
    }


def test_everything_stands_under_the_prefix() -> None:
    env = {"API_PREFIX": "/api/v1", "SIMULATED_GPUS": "2"}
    with ServerProcess(env) as server:
        assert server.ask("/api/v1/leases/a", "PUT", body={}).status == 201
        assert server.ask("/api/v1/leases/b", "PUT", body={}).status == 201
        assert server.ask("/api/v1/leases/c", "PUT", body={}).status == 202
        assert server.ask("/api/v1/leases/a").json["state"] == "active"
        answer = server.ask("/api/v1/leases/renew", "POST", body={"ids": ["a", "b", "c"]}).json
        assert [item["id"] for item in answer["renewed"]] == ["a", "b", "c"]
        assert len(server.json("/api/v1/leases")["leases"]) == 3
        assert_problem(server.ask("/leases/a"), 404, "/api/v1/")
        assert_problem(server.ask("/pool"), 404)
        assert "/api/v1/leases/{id}" in server.json("/api/v1/")["endpoints"]
        assert "/api/v1/leases/{lease_id}" in server.json("/api/v1/openapi.json")["paths"]
        assert server.ask("/api/v1/leases/a", "DELETE").json["state"] == "ended"
        assert json.loads(server.ask("/api/v1/leases/c?wait_s=10").body)["state"] == "active"
