"""A lease as a client sees it over HTTP, at a server in a process of its own: granted, asked for again, given back, listed."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.calls.leases.box import A100, FIELDS, GPUS
from tests.server.leasing import (
    assert_problem,
    eventually,
    get,
    held,
    new_id,
    put,
    queued,
    take,
    wait_until_free,
)


def is_recent(text: str) -> bool:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", text), text
    return abs((datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds()) < 60


# --- granted ---------------------------------------------------------------------------------------------------------


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


# --- asking again ----------------------------------------------------------------------------------------------------


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


# --- everything at a glance ------------------------------------------------------------------------------------------
