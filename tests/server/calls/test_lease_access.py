"""Who may ask for, renew and give back leases, over real sockets. The rules by themselves are in tests/server/http/test_access.py."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gpu_worker_pool.testing import Answer, ServerProcess
from tests.other_user import BOB as BOB_UID
from tests.server.calls_as import ask_as
from tests.server.leasing import OFTEN, assert_problem, eventually, held, new_id, put, queue, queued, release_all, take

ALICE, BOB, ADMIN = "alice-secret-token-1", "bob-secret-token-22", "admin-secret-token-333"
SECRETS = (ALICE, BOB, ADMIN)
TOKENS = f"alice:{ALICE},bob:{BOB},admin:{ADMIN}"

WRITING: list[tuple[str, str, Any]] = [
    ("PUT", "/leases/{id}", {}),
    ("DELETE", "/leases/{id}", None),
    ("POST", "/leases/renew", None),
]
OPERATING: list[tuple[str, str, Any]] = [
    ("POST", "/admin/leases/{id}/revoke", None),
    ("POST", "/admin/gpus/0/drain", {"reason": "x"}),
    ("POST", "/admin/gpus/0/undrain", None),
    ("PUT", "/admin/ignored-processes/Xorg", None),
    ("DELETE", "/admin/ignored-processes/Xorg", None),
]
CHANGING = [*WRITING, *OPERATING]
READING = ("/leases", "/pool", "/usage")
STATISTICS = ("/", "/gpu/stats", "/gpu/summary", "/gpu/history", "/health", "/config", "/metrics", "/docs")


def bearer(token: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", **headers}


@pytest.fixture(scope="module")
def open_box() -> Iterator[ServerProcess]:
    """No tokens: whoever is on the machine is trusted."""
    with ServerProcess({"SIMULATED_GPUS": "2", **OFTEN}) as server:
        yield server


@pytest.fixture(scope="module")
def with_tokens() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", "GPU_POOL_TOKENS": TOKENS, "LOG_LEVEL": "debug", **OFTEN}) as server:
        yield server


@pytest.fixture
def server(open_box: ServerProcess) -> Iterator[ServerProcess]:
    yield open_box
    release_all(open_box)


@pytest.fixture
def guarded(with_tokens: ServerProcess) -> Iterator[ServerProcess]:
    yield with_tokens
    release_all(with_tokens, bearer(ADMIN))


def make_all(
    server: ServerProcess, calls: list[tuple[str, str, Any]], lease_id: str, headers: Mapping[str, str]
) -> list[Answer]:
    return [
        server.ask(path.replace("{id}", lease_id), method, headers, {"ids": [lease_id]} if "renew" in path else body)
        for method, path, body in calls
    ]


def picture(server: ServerProcess) -> tuple[object, ...]:
    pool = server.json("/pool")
    shown = [(lease["id"], lease["state"]) for lease in (*pool["leases"], *pool["queue"])]
    return (shown, [gpu["is_out_of_service"] for gpu in pool["gpus"]], pool["ignored_processes"])


# --- from the machine itself -----------------------------------------------------------------------------------------


def test_without_a_token_this_machine_may_write(server: ServerProcess) -> None:
    lease_id = take(server, owner="whoever")["id"]

    assert [answer.status for answer in make_all(server, CHANGING, lease_id, {})][1:] == [200] * 7
    eventually(lambda: not held(server), "what was given back is free")


FOREIGN: list[tuple[int, dict[str, str], str]] = [
    (401, {"X-Forwarded-For": "127.0.0.1"}, "proxy"),
    (401, {"X-Forwarded-Host": "localhost"}, "proxy"),
    (401, {"Forwarded": "for=127.0.0.1"}, "proxy"),
    (401, {"X-Real-IP": "127.0.0.1"}, "proxy"),
    (401, {"Via": "1.1 squid"}, "proxy"),
    (401, {"Authorization": "Bearer nonsense-token"}, "gpu-pool token add"),
    (401, {"Authorization": "Basic YWRtaW46YWRtaW4="}, "Bearer"),
    (401, {"Authorization": ""}, "Bearer"),
    (403, {"Host": "evil.example"}, "Host"),
    (403, {"Host": "evil.example:8000"}, "Host"),
    (403, {"Host": "127.0.0.1.evil.example"}, "Host"),
    (403, {"Host": "localhost, evil.example"}, "Host"),
    (403, {"Host": ""}, "Host"),
    (403, {"Origin": "http://evil.example"}, "origin"),
    (403, {"Origin": "null"}, "origin"),
    (403, {"Origin": "http://localhost:1"}, "origin"),
    (403, {"Sec-Fetch-Site": "cross-site"}, "origin"),
]


@pytest.mark.parametrize(("status", "headers", "word"), FOREIGN, ids=str)
def test_whoever_may_be_somewhere_else_may_not_write(
    server: ServerProcess, status: int, headers: dict[str, str], word: str
) -> None:
    lease_id = take(server)["id"]
    before = picture(server)

    for answer in make_all(server, CHANGING, lease_id, headers):
        assert_problem(answer, status, word)
        assert ("www-authenticate" in answer.headers) is (status == 401)
        assert "access-control-allow-origin" not in answer.headers
    assert picture(server) == before
    for path in (*READING, f"/leases/{lease_id}"):
        assert server.ask(path, headers=headers).status == 200, "reading is open"


def test_who_may_not_write_is_told_before_his_body_is_read(server: ServerProcess) -> None:
    answer = server.ask(f"/leases/{new_id()}", "PUT", {"X-Forwarded-For": "1.2.3.4"}, b"x" * 100)

    assert_problem(answer, 401)


def test_the_page_of_this_server_may_write(server: ServerProcess) -> None:
    own = {"Origin": f"http://127.0.0.1:{server.port}", "Sec-Fetch-Site": "same-origin"}

    assert put(server, new_id(), headers=own).status == 201


def test_who_may_not_write_keeps_nothing_alive_by_looking(server: ServerProcess) -> None:
    take(server, gpus=2)
    waiter = queue(server, ttl_s=0.6)["id"]
    answer = server.ask(f"/leases/{waiter}?wait_s=20", headers={"X-Forwarded-For": "1.2.3.4"})

    assert answer.status == 200
    assert answer.json["end_reason"] == "expired"


def test_pages_of_other_origins_read_statistics_and_nothing_else(server: ServerProcess) -> None:
    lease_id = take(server)["id"]
    page = {"Origin": "http://some.page"}
    for path in (*READING, f"/leases/{lease_id}", "/events?pace_s=x", "/ui/data/pool", "/quotas", "/nowhere"):
        assert "access-control-allow-origin" not in server.ask(path, headers=page).headers, path
    for path in STATISTICS:
        answer = server.ask(path, headers=page)
        assert answer.headers["access-control-allow-origin"] == "*", path
        assert "access-control-allow-credentials" not in answer.headers
    for method in ("GET", "PUT", "DELETE", "POST"):
        asked = {**page, "Access-Control-Request-Method": method}
        for path in (f"/leases/{lease_id}", "/leases", "/leases/renew", "/admin/gpus/0/drain"):
            answer = server.ask(path, "OPTIONS", asked)
            assert answer.status == 405, answer
            assert "access-control-allow-origin" not in answer.headers
    allowed = server.ask("/gpu/stats", "OPTIONS", {**page, "Access-Control-Request-Method": "GET"})
    assert allowed.status == 200
    assert "authorization" not in allowed.headers.get("access-control-allow-headers", "").lower()


# --- with tokens -----------------------------------------------------------------------------------------------------


def test_the_owner_is_who_has_the_token(guarded: ServerProcess) -> None:
    lease = put(guarded, new_id(), headers=bearer(ALICE), owner="bob")

    assert lease.status == 201
    assert lease.json["owner"] == "alice"


def test_a_token_is_good_from_anywhere_and_through_a_proxy(guarded: ServerProcess) -> None:
    passed_on = bearer(ALICE, Host="gpu1.lab", **{"X-Forwarded-For": "10.0.0.7"})

    assert put(guarded, new_id(), headers=passed_on).status == 201
    assert_problem(put(guarded, new_id(), headers={**passed_on, "Origin": "http://evil.example"}), 403, "origin")


def test_nobody_changes_what_is_anothers(guarded: ServerProcess) -> None:
    lease_id = new_id()
    assert put(guarded, lease_id, headers=bearer(ALICE)).status == 201
    before = picture(guarded)

    for headers in (bearer(BOB),):
        assert_problem(put(guarded, lease_id, headers=headers), 403, lease_id, "alice")
        assert_problem(guarded.ask(f"/leases/{lease_id}", "DELETE", headers), 403, lease_id, "alice")
        renewal = guarded.ask("/leases/renew", "POST", headers, {"ids": [lease_id]})
        assert_problem(renewal, 403, lease_id)
        assert guarded.ask(f"/leases/{lease_id}", headers=headers).json["owner"] == "alice", "reading is open"
    assert picture(guarded) == before


def test_a_renewal_with_one_of_anothers_renews_none(guarded: ServerProcess) -> None:
    alices, bobs = new_id(), new_id()
    put(guarded, alices, headers=bearer(ALICE), ttl_s=100)
    put(guarded, bobs, headers=bearer(BOB), ttl_s=100)

    before = guarded.ask(f"/leases/{bobs}").json["expires_in_s"]
    answer = guarded.ask("/leases/renew", "POST", bearer(BOB), {"ids": [bobs, alices]})
    assert_problem(answer, 403, alices)
    assert bobs not in answer.json["detail"]
    assert guarded.ask(f"/leases/{bobs}").json["expires_in_s"] <= before


def test_admin_may_manage_what_is_anothers(guarded: ServerProcess) -> None:
    lease_id, other = new_id(), new_id()
    put(guarded, lease_id, headers=bearer(ALICE))
    put(guarded, other, headers=bearer(ALICE))

    renewal = guarded.ask("/leases/renew", "POST", bearer(ADMIN), {"ids": [lease_id]})
    assert [item["id"] for item in renewal.json["renewed"]] == [lease_id]
    assert guarded.ask(f"/leases/{lease_id}", "DELETE", bearer(ADMIN)).json["end_reason"] == "released"
    revoked = guarded.ask(f"/admin/leases/{other}/revoke", "POST", bearer(ADMIN))
    assert revoked.json["end_reason"] == "revoked"


def test_only_admin_may_do_what_is_the_operators(guarded: ServerProcess) -> None:
    lease_id = new_id()
    put(guarded, lease_id, headers=bearer(ALICE))
    before = picture(guarded)

    for headers in (bearer(ALICE), bearer(BOB)):
        for answer in make_all(guarded, OPERATING, lease_id, headers):
            assert_problem(answer, 403, "admin")
    assert picture(guarded) == before
    assert_problem(guarded.ask("/admin/gpus/0/drain", "POST", {"X-Forwarded-For": "1.2.3.4"}), 401)


def test_a_token_that_is_not_known_is_refused_here_too(guarded: ServerProcess) -> None:
    for headers in (bearer("stale-secret-token"), bearer(ALICE[:-1]), bearer(ALICE + "x"), {"Authorization": ALICE}):
        for answer in make_all(guarded, CHANGING, new_id(), headers):
            detail = assert_problem(answer, 401)
            assert "stale" not in detail
            assert 'Bearer realm="gpu-worker-pool"' in answer.headers["www-authenticate"]
    assert (held(guarded), queued(guarded)) == (set(), [])


def test_an_administrator_of_this_machine_may_request_for_another_owner(guarded: ServerProcess) -> None:
    """The tests run as the user of the server. What other users may is in tests/server/test_who_asks.py."""
    mine = take(guarded, owner="carol")["id"]
    assert_problem(guarded.ask(f"/leases/{mine}", "DELETE", bearer(BOB)), 403, "carol")
    assert guarded.ask(f"/leases/{mine}", "DELETE").json["state"] == "ended"


def test_a_token_is_shown_nowhere(guarded: ServerProcess) -> None:
    put(guarded, new_id(), headers=bearer(ALICE))
    put(guarded, new_id(), headers=bearer("stale-secret-token"))
    put(guarded, new_id(), headers={"Authorization": f"Token {BOB}"})
    guarded.ask("/admin/gpus/0/undrain", "POST", bearer(ADMIN))

    shown = [
        guarded.ask(path).body.decode()
        for path in ("/", "/config", "/metrics", "/openapi.json", "/leases", "/pool", "/health")
    ]
    journal = b"".join(path.read_bytes() for path in guarded.state_dir.iterdir() if path.is_file())
    for text in (*shown, guarded.log(), journal.decode("latin-1")):
        for secret in (*SECRETS, "stale-secret-token"):
            assert secret not in text
    assert "PUT /leases/" in guarded.log(), "the log is the one that was looked through"


def test_a_token_that_is_too_short_is_not_accepted_and_the_log_says_what_to_do() -> None:
    with ServerProcess({"GPU_POOL_TOKENS": f"alice:{ALICE},bob:eight888"}) as server:
        assert_problem(put(server, new_id(), headers=bearer("eight888")), 401, "not known")
        assert put(server, new_id(), headers=bearer(ALICE)).status == 201
        assert "the token of entry 2 has fewer than 16 characters" in server.log()
        assert "gpu-pool token add NAME" in server.log()
        assert "eight888" not in server.log()


@pytest.mark.parametrize("broken", ["alice-secret-token-1", f"alice:{ALICE},bob:{ALICE}"])
def test_broken_tokens_let_no_token_in_and_trust_nobody_more(broken: str) -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_TOKENS": broken}) as server:
        assert_problem(put(server, "a", headers=bearer(ALICE)), 401, "cannot be read")
        for answer in ask_as(
            BOB_UID, server, [("POST", "/admin/gpus/0/drain", None), ("POST", "/admin/leases/a/revoke", None)]
        ):
            assert_problem(answer, 403, "admin")
        assert put(server, "a").status == 201, "a user of the machine may still ask"
        assert server.json("/pool")["gpus"][0]["is_out_of_service"] is False
        assert "no token of it is accepted" in server.log()
        added = hashlib.sha256(b"a-token-that-was-added").hexdigest()
        assert server.ask(f"/admin/tokens/{added}", "PUT", body={"name": "dora"}).status == 200
        me = server.ask("/ui/data/me", headers=bearer("a-token-that-was-added"))
        assert me.json["name"] == "dora", "tokens of the journal are accepted"
        assert broken not in server.log()
        assert ALICE not in server.log()


def test_a_file_of_tokens_that_is_not_there_is_no_file_without_tokens() -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_TOKENS_FILE": "/nonexistent/tokens"}) as server:
        (refused,) = ask_as(BOB_UID, server, [("POST", "/admin/gpus/0/drain", None)])
        assert_problem(refused, 403, "admin")
        assert put(server, "a").status == 201
