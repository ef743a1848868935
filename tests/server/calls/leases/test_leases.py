"""A lease as a client sees it over HTTP, at a server in a process of its own: granted, asked for again, given back, listed."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.calls.leases.box import A100, FIELDS, GPUS, NODE
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


def test_what_has_ended_does_not_begin_again(server: ServerProcess) -> None:
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


def test_a_waiter_is_answered_when_its_request_is_cancelled(server: ServerProcess) -> None:
    take(server, gpus=GPUS)
    waiter = queue(server)
    with LongPoll(server, f"/leases/{waiter['id']}?wait_s=25") as poll:
        poll.held()
        release(server, waiter["id"])
        assert poll.answer().json["end_reason"] == "cancelled"


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
