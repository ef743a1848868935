"""Who may ask for, renew and give back leases, over real sockets. The rules by themselves are in tests/server/http/test_access.py."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.other_user import BOB as BOB_UID
from tests.server.calls_as import ask_as
from tests.server.leasing import OFTEN, assert_problem, new_id, put, queue, release_all, take

ALICE, BOB, ADMIN = "alice-secret-token-1", "bob-secret-token-22", "admin-secret-token-333"
SECRETS = (ALICE, BOB, ADMIN)
TOKENS = f"alice:{ALICE},bob:{BOB},admin:{ADMIN}"

READING = ("/leases", "/pool", "/usage")
STATISTICS = ("/", "/gpu/stats", "/gpu/summary", "/gpu/history", "/health", "/config", "/metrics", "/docs")


def bearer(token: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", **headers}


@pytest.fixture(scope="module")
def open_box() -> Iterator[ServerProcess]:
    """No tokens: callers on the machine are trusted."""
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


# --- from the machine itself -----------------------------------------------------------------------------------------


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


def test_a_token_is_good_from_anywhere_and_through_a_proxy(guarded: ServerProcess) -> None:
    passed_on = bearer(ALICE, Host="gpu1.lab", **{"X-Forwarded-For": "10.0.0.7"})

    assert put(guarded, new_id(), headers=passed_on).status == 201
    assert_problem(put(guarded, new_id(), headers={**passed_on, "Origin": "http://evil.example"}), 403, "origin")


def test_a_renewal_with_one_of_anothers_renews_none(guarded: ServerProcess) -> None:
    alices, bobs = new_id(), new_id()
    put(guarded, alices, headers=bearer(ALICE), ttl_s=100)
    put(guarded, bobs, headers=bearer(BOB), ttl_s=100)

    before = guarded.ask(f"/leases/{bobs}").json["expires_in_s"]
    answer = guarded.ask("/leases/renew", "POST", bearer(BOB), {"ids": [bobs, alices]})
    assert_problem(answer, 403, alices)
    assert bobs not in answer.json["detail"]
    assert guarded.ask(f"/leases/{bobs}").json["expires_in_s"] <= before


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
