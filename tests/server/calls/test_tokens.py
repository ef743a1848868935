"""Tokens over HTTP: they take effect at once, outlast a restart, and give the rights of their role."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.calls.test_lease_access import ADMIN, ALICE, TOKENS, bearer
from tests.server.leasing import OFTEN, LongPoll, assert_problem, eventually, new_id, put, release_all


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", "GPU_POOL_TOKENS": TOKENS, **OFTEN}) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    for token in listed(running):
        if token["digest"]:
            running.ask(f"/admin/tokens/{token['digest']}", "DELETE", bearer(ADMIN))
    running.ask("/quotas/carol", "DELETE", bearer(ADMIN))
    running.ask("/admin/gpus/0/undrain", "POST", bearer(ADMIN))
    release_all(running, bearer(ADMIN))


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def add(server: ServerProcess, name: str = "carol", **form: Any) -> str:
    token = secrets.token_urlsafe(24)
    answer = server.ask(f"/admin/tokens/{digest(token)}", "PUT", bearer(ADMIN), {"name": name, **form})
    assert answer.status == 200, answer
    return token


def listed(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.ask("/admin/tokens", headers=bearer(ADMIN)).json["tokens"]
    return found


def test_a_token_is_accepted_at_once_and_refused_as_soon_as_it_is_revoked(server: ServerProcess) -> None:
    token, lease = add(server), new_id()

    assert put(server, lease, headers=bearer(token)).json["owner"] == "carol"
    assert server.ask(f"/admin/tokens/{digest(token)}", "DELETE", bearer(ADMIN)).status == 200

    assert_problem(server.ask(f"/leases/{lease}", "DELETE", bearer(token)), 401, "not known")
    assert server.json(f"/leases/{lease}")["state"] == "active", "what the token requested stays its owner's"


def test_a_call_that_waits_is_refused_when_its_token_is_revoked(server: ServerProcess) -> None:
    token, held, waiter = add(server), new_id(), new_id()
    other = bearer(add(server))  # of the same owner, and valid
    assert put(server, held, gpus=2, headers=bearer(token)).status == 201
    assert put(server, waiter, headers=bearer(token)).status == 202
    body = json.dumps({"ids": [held], "wait_s": 50}).encode()
    with (
        LongPoll(server, f"/leases/{waiter}", "PUT", b'{"wait_s": 50}', bearer(token)) as asking,
        LongPoll(server, f"/leases/{waiter}?wait_s=50", headers=bearer(token)) as looking,
        LongPoll(server, "/leases/renew", "POST", body, bearer(token)) as renewing,
        LongPoll(server, f"/leases/{waiter}?wait_s=50", headers=other) as another,
    ):
        eventually(lambda: b"gpupool_waiting_connections 4.0" in server.ask("/metrics").body, "all wait")
        server.ask(f"/admin/tokens/{digest(token)}", "DELETE", bearer(ADMIN))

        for call in (asking, looking, renewing):
            assert_problem(call.answer(), 401, "no longer valid")
        assert [server.json(f"/leases/{id_}")["state"] for id_ in (held, waiter)] == ["active", "queued"]
        server.ask(f"/leases/{held}", "DELETE", bearer(ADMIN))
        assert another.grant().json["state"] == "active", "a call with a token that is valid waits on"


def test_tokens_outlast_a_restart_as_digests(tmp_path: Path) -> None:
    env = {"SIMULATED_GPUS": "1", "GPU_POOL_STATE_DIR": str(tmp_path / "state")}
    token = "a-token-of-carol-0123456789"  # noqa: S105 - of nobody
    with ServerProcess(env) as server:
        assert server.ask(f"/admin/tokens/{digest(token)}", "PUT", body={"name": "carol"}).status == 200
        log = server.log()
    with ServerProcess(env) as server:
        assert put(server, new_id(), headers=bearer(token)).json["owner"] == "carol"
        log += server.log()

    assert token not in log
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert any(digest(token).encode() in path.read_bytes() for path in files)
    assert all(token.encode() not in path.read_bytes() for path in files)


def test_all_tokens_are_listed_for_administrators_only(server: ServerProcess) -> None:
    token = add(server, role="operator", note="her laptop")

    found = {each["name"]: each for each in listed(server)}

    assert found["carol"] | {"added_at": ""} == {
        "digest": digest(token),
        "name": "carol",
        "role": "operator",
        "added_at": "",
        "added_by": "admin",
        "note": "her laptop",
    }
    assert (found["admin"]["role"], found["alice"]["role"], found["alice"]["digest"]) == ("administrator", "user", None)
    for other in (token, ALICE):
        for method, path in (("GET", ""), ("PUT", f"/{'ab' * 32}"), ("DELETE", f"/{digest(token)}")):
            answer = server.ask(f"/admin/tokens{path}", method, bearer(other), {"name": "eve"} if path else None)
            assert_problem(answer, 403, "administrator")
    page = {**bearer(ADMIN), "Origin": "http://evil.example"}
    assert_problem(server.ask("/admin/tokens", headers=page), 403, "another origin")


@pytest.mark.parametrize(
    ("role", "runs_gpus", "decides"), [("user", False, False), ("operator", True, False), ("administrator", True, True)]
)
def test_a_role_gives_its_rights(server: ServerProcess, role: str, *, runs_gpus: bool, decides: bool) -> None:
    mine, theirs, token = new_id(), new_id(), add(server, role=role)
    assert put(server, theirs, headers=bearer(ALICE)).status == 201
    assert put(server, mine, headers=bearer(token)).status == 201

    calls = {
        "own lease": server.ask(f"/leases/{mine}", "DELETE", bearer(token)),
        "drain": server.ask("/admin/gpus/0/drain", "POST", bearer(token)),
        "revoke": server.ask(f"/admin/leases/{theirs}/revoke", "POST", bearer(token)),
        "quota": server.ask("/quotas/carol", "PUT", bearer(token), {"gpus": 1}),
    }

    expected = {"own lease": True, "drain": runs_gpus, "revoke": runs_gpus, "quota": decides}
    assert {name: answer.status == 200 for name, answer in calls.items()} == expected
    me = server.ask("/ui/data/me", headers=bearer(token)).json
    assert me == {"name": "carol", "is_admin": role == "administrator", "role": role}


def test_an_operator_that_ends_a_lease_as_its_holder_is_named(server: ServerProcess) -> None:
    theirs, mine, token = new_id(), new_id(), add(server, role="operator")
    put(server, theirs, headers=bearer(ALICE))
    put(server, mine, headers=bearer(token))

    ended = {id_: server.ask(f"/leases/{id_}?as=holder", "DELETE", bearer(token)).json for id_ in (theirs, mine)}

    assert {id_: lease["ended_by"] for id_, lease in ended.items()} == {theirs: "carol", mine: None}


def test_an_operator_requests_for_no_other_owner(server: ServerProcess) -> None:
    operator, administrator = add(server, role="operator"), add(server, role="administrator")

    assert put(server, new_id(), owner="dave", headers=bearer(operator)).json["owner"] == "carol"
    assert put(server, new_id(), owner="dave", headers=bearer(administrator)).json["owner"] == "dave"


def test_a_token_has_one_name_and_what_is_not_known_is_not_revoked(server: ServerProcess) -> None:
    token = add(server)

    answer = server.ask(f"/admin/tokens/{digest(token)}", "PUT", bearer(ADMIN), {"name": "dave"})
    assert_problem(answer, 409, "carol")
    assert_problem(server.ask(f"/admin/tokens/{'0' * 64}", "DELETE", bearer(ADMIN)), 404, "no token")
