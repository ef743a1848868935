"""Reading is open; writing is for those who are on the machine and for those who have a token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.server.http.access import (
    AccessRules,
    Caller,
    Denied,
    Origin,
    is_loopback,
    may_manage,
    merge_headers,
    owner_for,
    proxy_header,
)
from gpu_worker_pool.server.http.access import identify as identify_by
from gpu_worker_pool.server.http.tokens import Tokens

ALICE, BOB, ADMIN = "alice-secret-token-1", "bob-secret-token-22", "admin-secret-token-333"
TOKENS = Tokens.parse(f"alice:{ALICE},bob:{BOB},admin:{ADMIN}")
UNSET = Tokens()
BROKEN = Tokens.broken()
HERE = {"host": "localhost:8000"}


def identify(host: str | None, headers: dict[str, str], tokens: Tokens) -> Caller:
    """As on a platform that cannot tell users."""
    return identify_by(Origin(host), headers, AccessRules(tokens))


def denied(host: str | None, headers: dict[str, str], tokens: Tokens = TOKENS) -> Denied:
    with pytest.raises(Denied) as caught:
        identify(host, headers, tokens)
    assert ("WWW-Authenticate" in caught.value.headers) is (caught.value.status == 401)
    return caught.value


# --- writing without a token ---------------------------------------------------------------------------------------

LOOPBACK = ["127.0.0.1", "127.1.2.3", "::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1", "::ffff:127.9.9.9"]
ELSEWHERE = [
    *(None, "", "10.0.0.1", "192.168.1.7", "0.0.0.0", "128.0.0.1", "::", "::2", "fe80::1", "::ffff:10.0.0.1"),  # noqa: S104 - nothing is bound
    *("localhost", "testclient", "127.1", "127.0.0.1.evil.com", "/run/pool.sock", "2130706433", "\ud800"),
]


@pytest.mark.parametrize("client_host", ELSEWHERE)
@pytest.mark.parametrize("tokens", [UNSET, TOKENS, BROKEN])
def test_a_caller_elsewhere_needs_a_token(client_host: str | None, tokens: Tokens) -> None:
    error = denied(client_host, HERE, tokens)
    assert error.status == 401
    assert "gpu-pool token add" in error.detail
    assert error.headers == {"WWW-Authenticate": 'Bearer realm="gpu-worker-pool"'}
    assert not is_loopback(client_host)


PROXIES = [
    *("forwarded", "via", "x-real-ip", "x-client-ip", "cf-connecting-ip", "true-client-ip"),
    *("x-forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-anything"),
]


# --- whose lease ---------------------------------------------------------------------------------------------------

LOCAL, NAMED, BOSS = Caller(is_local=True), Caller(name="alice"), Caller(name="admin", role=Role.ADMINISTRATOR)
TRUSTED = Caller(is_local=True, role=Role.ADMINISTRATOR)

OWNERS: list[tuple[Caller, str | None, Tokens, str | None]] = [
    (NAMED, None, TOKENS, "alice"),
    (NAMED, "alice", TOKENS, "alice"),
    (NAMED, "bob", TOKENS, "alice"),
    (BOSS, "bob", TOKENS, "bob"),
    (BOSS, None, TOKENS, "admin"),
    (LOCAL, None, TOKENS, None),
    (LOCAL, " ", TOKENS, None),
    (LOCAL, "carol", TOKENS, "carol"),
    (LOCAL, " carol ", TOKENS, "carol"),
    (TRUSTED, "alice", UNSET, "alice"),
    (TRUSTED, "admin", UNSET, "admin"),
    (LOCAL, None, BROKEN, None),
]


@pytest.mark.parametrize(("caller", "claimed", "tokens", "owner"), OWNERS)
def test_whose_a_new_lease_is(caller: Caller, claimed: str | None, tokens: Tokens, owner: str | None) -> None:
    assert owner_for(caller, claimed, tokens) == owner


@pytest.mark.parametrize(
    ("claimed", "tokens", "why"),
    [
        ("alice", TOKENS, "The owner alice has a token; send that token, or leave"),
        (" alice ", TOKENS, "The owner alice has a token; send that token, or leave"),
        ("admin", TOKENS, "The owner admin has a token; send that token"),
        ("carol", BROKEN, "cannot be read"),
    ],
)
def test_a_name_that_can_be_proven_cannot_be_claimed(claimed: str, tokens: Tokens, why: str) -> None:
    with pytest.raises(Denied, match=why) as caught:
        owner_for(LOCAL, claimed, tokens)
    assert caught.value.status == 403


MANAGED: list[tuple[Caller, str | None, Tokens, bool]] = [
    (NAMED, "alice", TOKENS, True),
    (NAMED, "bob", TOKENS, False),
    (NAMED, "carol", TOKENS, False),  # carol has no token, so hers is for those on the machine
    (NAMED, None, TOKENS, False),
    (BOSS, "alice", TOKENS, True),
    (BOSS, "carol", TOKENS, True),
    (BOSS, None, TOKENS, True),
    (LOCAL, "alice", TOKENS, False),
    (LOCAL, "admin", TOKENS, False),
    (LOCAL, "carol", TOKENS, True),
    (LOCAL, None, TOKENS, True),
    (TRUSTED, "alice", UNSET, True),
    (TRUSTED, None, UNSET, True),
    (LOCAL, "alice", BROKEN, False),  # who knows whether alice has a token
    (LOCAL, None, BROKEN, True),
    (Caller(), None, TOKENS, False),
    (Caller(), "carol", TOKENS, False),
    (Caller(name="alice", is_local=True), "carol", TOKENS, False),
]


@pytest.mark.parametrize(("caller", "owner", "tokens", "may"), MANAGED)
def test_who_may_renew_and_release_whose_lease(caller: Caller, owner: str | None, tokens: Tokens, may: bool) -> None:
    assert may_manage(caller, owner, tokens) is may


# --- whatever is sent ----------------------------------------------------------------------------------------------


def test_headers_that_come_twice_are_joined() -> None:
    raw = [(b"Host", b"localhost"), (b"X-A", b"1"), (b"host", b"evil.com"), (b"x-b", b"\xff")]
    headers = merge_headers(raw)
    assert headers == {"host": "localhost, evil.com", "x-a": "1", "x-b": "ÿ"}
    assert denied("127.0.0.1", headers, UNSET).status == 403


NAMES = st.sampled_from(["host", "origin", "authorization", "sec-fetch-site", *PROXIES]) | st.text(st.characters())
VALUES = (
    st.sampled_from(["localhost:8000", "http://localhost:8000", f"Bearer {ALICE}", "Bearer x", "same-origin", "[::1]"])
    | st.text(st.characters())
    | st.from_regex(r"(http://|Bearer |)[a-z\[\]:0-9.]*", fullmatch=True)
)
HOSTS = st.none() | st.sampled_from([*LOOPBACK, "10.0.0.1"]) | st.ip_addresses().map(str) | st.text(st.characters())


def _identify(host: str | None, headers: dict[str, str], tokens: Tokens) -> Caller | Denied:
    try:
        return identify(host, headers, tokens)
    except Denied as error:
        return error


@given(HOSTS, st.dictionaries(NAMES, VALUES, max_size=4), st.sampled_from([UNSET, TOKENS, BROKEN]))
def test_no_headers_raise_anything_but_denied(host: str | None, headers: dict[str, str], tokens: Tokens) -> None:
    outcome = _identify(host, headers, tokens)
    if isinstance(outcome, Denied):
        outcome.detail.encode()
        assert outcome.status in {401, 403}
    elif outcome.name is None:
        assert outcome.is_local
        assert is_loopback(host)
        assert "authorization" not in headers
        assert proxy_header(headers) is None
    else:
        assert tokens is TOKENS
        assert headers["authorization"].endswith(ALICE)
