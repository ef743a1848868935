"""Reading is open; writing is for those who are on the machine and for those who have a token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.core.model.configured import AccessToken, Role
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
from gpu_worker_pool.server.http.tokens import Proven, Tokens, digest_of

ALICE, BOB, ADMIN = "alice-secret-token-1", "bob-secret-token-22", "admin-secret-token-333"
TOKENS = Tokens.parse(f"alice:{ALICE},bob:{BOB},admin:{ADMIN}")
UNSET = Tokens()
BROKEN = Tokens.broken()
HERE = {"host": "localhost:8000"}


def bearer(token: str, **headers: str) -> dict[str, str]:
    return {"host": "gpu1.lab:8000", "authorization": f"Bearer {token}", **headers}


def identify(host: str | None, headers: dict[str, str], tokens: Tokens) -> Caller:
    """As on a platform that cannot tell users."""
    return identify_by(Origin(host), headers, AccessRules(tokens))


def denied(host: str | None, headers: dict[str, str], tokens: Tokens = TOKENS) -> Denied:
    with pytest.raises(Denied) as caught:
        identify(host, headers, tokens)
    assert ("WWW-Authenticate" in caught.value.headers) is (caught.value.status == 401)
    return caught.value


# --- tokens --------------------------------------------------------------------------------------------------------

GOOD_TEXTS: list[tuple[str, dict[str, str]]] = [
    ("", {}),
    (" \n , ", {}),
    ("# nobody yet\n", {}),
    ("alice:1234567812345678", {"1234567812345678": "alice"}),
    ("alice:1234567812345678,bob:abcdefghabcdefgh", {"1234567812345678": "alice", "abcdefghabcdefgh": "bob"}),
    (" alice:1234567812345678 ,\tbob:abcdefghabcdefgh,\n", {"1234567812345678": "alice", "abcdefghabcdefgh": "bob"}),
    (
        "# who\nalice:1234567812345678 # laptop\r\n\r\n  # bob:zzzzzzzz\nbob:abcdefghabcdefgh",
        {"1234567812345678": "alice", "abcdefghabcdefgh": "bob"},
    ),
    (
        "alice:the-old-token-of-a,alice:the-new-token-of-a",
        {"the-old-token-of-a": "alice", "the-new-token-of-a": "alice"},
    ),
    ("alice:1234567812345678,alice:1234567812345678", {"1234567812345678": "alice"}),
    ("a.b_c@d-9:12:34:5678#=12:34:5678#=", {"12:34:5678#=12:34:5678#=": "a.b_c@d-9"}),
]


@pytest.mark.parametrize(("text", "owners"), GOOD_TEXTS)
def test_tokens_are_read(text: str, owners: dict[str, str]) -> None:
    tokens = Tokens.parse(text)
    assert {token: found[0] for token in owners if (found := tokens.find(token))} == owners
    assert tokens.names == frozenset(owners.values())
    assert tokens.is_unset is (not owners)
    assert not tokens.is_broken


BAD_TEXTS = [
    ("alice:1234567812345678,s3cret-word-and-more", "entry 2 has no colon"),
    ("alice:1234567812345678, :s3cret-word-and-more", "entry 2 has no name"),
    ("alice: s3cret-word-and-more", "entry 2 has no colon"),
    ("ali/ce:s3cret-word-and-more", "entry 1: the name must be"),
    ("ünal:s3cret-word-and-more", "entry 1: the name must be"),
    ("a" * 65 + ":s3cret-word-and-more", "entry 1: the name must be"),
    ("alice:s3cret-wörd-and-more", "entry 1: the token must be visible ASCII"),
    ("alice:s3cret-\x00word-and-more", "entry 1: the token must be visible ASCII"),
    (
        "alice:s3cret-word-and-more\nbob:1234567812345678\ncarol:s3cret-word-and-more",
        "entries 1 and 3 have the same token",
    ),
]


@pytest.mark.parametrize(("text", "fault"), BAD_TEXTS)
def test_bad_tokens_are_refused_without_being_shown(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=r"^entr") as caught:
        Tokens.parse(text)
    assert fault in str(caught.value)
    # Not even where somebody wrote it before the colon.
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("short", ["s3cret-", "", "fifteen-letters", "alice"])
def test_a_token_that_is_too_short_is_not_accepted_and_the_others_are(short: str) -> None:
    tokens = Tokens.parse(f"bob:{BOB},alice:{short}")

    assert (tokens.find(short), tokens.find(BOB)) == (None, Proven("bob", Role.USER))
    assert tokens.too_short == (2,)
    assert tokens.names == {"alice", "bob"}, "no other caller may take the name"
    alone = Tokens.parse(f"alice:{short}")
    assert (alone.is_unset, alone.is_broken) == (False, False)


@pytest.mark.parametrize(
    "presented", ["", "alice-token-", ALICE + "x", ALICE.upper(), "alice", f"alice:{ALICE}", "\ud800"]
)
def test_what_is_not_a_token_is_nobodys(presented: str) -> None:
    assert TOKENS.find(presented) is None


class OnlyByKey(dict[str, Any]):
    """Is never gone through."""

    def __iter__(self) -> Any:
        raise AssertionError("it is searched")

    items = values = keys = __iter__


def test_a_token_is_found_by_its_digest_whatever_their_number() -> None:
    token = AccessToken(digest_of(BOB), "bob", Role.OPERATOR, 0.0)
    tokens = Tokens(OnlyByKey({digest_of(ALICE): "alice"}))
    tokens.added = lambda: OnlyByKey({digest_of(BOB): token})
    assert tokens.find(ALICE) == Proven("alice", Role.USER)
    assert tokens.find(BOB) == Proven("bob", Role.OPERATOR)
    assert tokens.find("x") is None


def test_a_token_that_was_added_proves_its_name_and_role_until_it_is_revoked() -> None:
    added: dict[str, AccessToken] = {}
    tokens = Tokens.parse(f"alice:{ALICE}")
    tokens.added = lambda: added
    secret = "carols-token-4444"  # noqa: S105 - of nobody
    assert tokens.find(secret) is None

    token = AccessToken(digest_of(secret), "carol", Role.OPERATOR, 0.0)
    added[token.digest] = token
    assert tokens.find(secret) == Proven("carol", Role.OPERATOR)
    assert tokens.find(ALICE) == Proven("alice", Role.USER)
    assert tokens.names == {"alice", "carol"}

    added.clear()
    assert tokens.find(secret) is None


def test_the_first_token_that_is_added_counts_as_one() -> None:
    tokens = Tokens()
    assert tokens.is_unset

    tokens.added = lambda: {"ab" * 32: AccessToken("ab" * 32, "carol", Role.USER, 0.0)}

    assert not tokens.is_unset


def test_tokens_show_names_only() -> None:
    assert repr(TOKENS) == str(TOKENS) == "Tokens(admin, alice, bob)"
    assert repr(BROKEN) == "Tokens(broken)"
    assert repr(UNSET) == "Tokens()"
    assert ALICE.encode() not in repr(vars(TOKENS)).encode()  # not kept at all


# --- writing without a token ---------------------------------------------------------------------------------------

LOOPBACK = ["127.0.0.1", "127.1.2.3", "::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1", "::ffff:127.9.9.9"]
ELSEWHERE = [
    *(None, "", "10.0.0.1", "192.168.1.7", "0.0.0.0", "128.0.0.1", "::", "::2", "fe80::1", "::ffff:10.0.0.1"),  # noqa: S104 - nothing is bound
    *("localhost", "testclient", "127.1", "127.0.0.1.evil.com", "/run/pool.sock", "2130706433", "\ud800"),
]


@pytest.mark.parametrize("client_host", LOOPBACK)
@pytest.mark.parametrize("tokens", [UNSET, TOKENS, BROKEN])
def test_whoever_is_on_the_machine_may_write(client_host: str, tokens: Tokens) -> None:
    caller = identify(client_host, HERE, tokens)
    assert caller == Caller(name=None, is_local=True, role=Role.ADMINISTRATOR if tokens is UNSET else Role.USER)
    assert is_loopback(client_host)


@pytest.mark.parametrize("client_host", ELSEWHERE)
@pytest.mark.parametrize("tokens", [UNSET, TOKENS, BROKEN])
def test_whoever_is_elsewhere_needs_a_token(client_host: str | None, tokens: Tokens) -> None:
    error = denied(client_host, HERE, tokens)
    assert error.status == 401
    assert "gpu-pool token add" in error.detail
    assert error.headers == {"WWW-Authenticate": 'Bearer realm="gpu-worker-pool"'}
    assert not is_loopback(client_host)


PROXIES = [
    *("forwarded", "via", "x-real-ip", "x-client-ip", "cf-connecting-ip", "true-client-ip"),
    *("x-forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-anything"),
]


@pytest.mark.parametrize("name", PROXIES)
@pytest.mark.parametrize("value", ["127.0.0.1", ""])
def test_what_came_through_a_proxy_is_not_local(name: str, value: str) -> None:
    error = denied("127.0.0.1", {**HERE, name: value}, UNSET)
    assert error.status == 401
    assert f"through a proxy ({name})" in error.detail
    assert proxy_header({**HERE, name: value}) == name
    assert identify("127.0.0.1", bearer(ALICE, **{name: value}), TOKENS).name == "alice"


GOOD_HOSTS = [
    *(
        "localhost",
        "localhost:8000",
        "LocalHost.:8000",
        "gpu1.localhost:1",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.8.9.1:80",
    ),
    *("[::1]", "[::1]:8000", "[0:0::1]:8000", "[::ffff:127.0.0.1]:8000", "localhost:"),
]
BAD_HOSTS = [
    *("", "evil.com", "evil.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "notlocalhost", "gpu1", "10.0.0.1"),
    *(
        "0.0.0.0:8000",
        "[::]:8000",
        "::1",
        "[::1",
        "localhost:8000, evil.com",
        "evil.com#localhost",
        "localhost@evil.com",
    ),
    *(
        "127.1",
        "0x7f.0.0.1",
        "127.0.0.1:8000:1",
        "localhost..",
        "localhost:123456",
        "\ud800",
        "\uff1127.0.0.1",
        "[localhost]",
    ),
]


@pytest.mark.parametrize("host", GOOD_HOSTS)
def test_this_machine_has_these_names(host: str) -> None:
    assert identify("127.0.0.1", {"host": host}, UNSET).is_local


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_another_name_for_this_machine_is_a_rebound_one(host: str) -> None:
    error = denied("127.0.0.1", {"host": host}, UNSET)
    assert error.status == 403
    assert "Host must be localhost" in error.detail


def test_a_call_without_a_host_is_refused() -> None:
    assert denied("127.0.0.1", {}, UNSET).status == 403


# --- pages of other origins ----------------------------------------------------------------------------------------

SAME_ORIGIN = [
    ("http://localhost:8000", "localhost:8000"),
    ("HTTP://LOCALHOST:8000", "localhost.:8000"),
    ("http://localhost", "localhost:80"),
    ("http://localhost:80", "localhost"),
    ("https://localhost", "localhost"),
    ("https://localhost:443", "localhost"),
    ("http://[::1]:8000", "[::1]:8000"),
]
OTHER_ORIGIN = [
    ("null", "localhost:8000"),
    ("", "localhost:8000"),
    ("http://localhost:3000", "localhost:8000"),
    ("http://localhost", "localhost:8000"),
    ("https://localhost", "localhost:80"),
    ("http://127.0.0.1:8000", "localhost:8000"),
    ("http://evil.com", "localhost:8000"),
    ("http://evil.com:8000", "localhost:8000"),
    ("http://localhost:8000/", "localhost:8000"),
    ("http://localhost:8000, http://evil.com", "localhost:8000"),
    ("http://evil.com@localhost:8000", "localhost:8000"),
    ("file://localhost:8000", "localhost:8000"),
    ("chrome-extension://localhost:8000", "localhost:8000"),
    ("localhost:8000", "localhost:8000"),
]


@pytest.mark.parametrize(("origin", "host"), SAME_ORIGIN)
def test_the_servers_own_page_may_write(origin: str, host: str) -> None:
    assert identify("127.0.0.1", {"host": host, "origin": origin, "sec-fetch-site": "same-origin"}, UNSET).is_local
    assert identify("10.0.0.9", bearer(ALICE, host=host, origin=origin), TOKENS).name == "alice"


@pytest.mark.parametrize(("origin", "host"), OTHER_ORIGIN)
def test_a_page_of_another_origin_may_not_with_a_token_or_without(origin: str, host: str) -> None:
    for headers in ({"host": host, "origin": origin}, bearer(ALICE, host=host, origin=origin)):
        error = denied("127.0.0.1", headers)
        assert error.status == 403
        assert "Origin and Host differ" in error.detail


def test_an_origin_without_a_host_is_another_one() -> None:
    headers = {"authorization": f"Bearer {ALICE}", "origin": "http://gpu1.lab:8000"}
    assert denied("10.0.0.9", headers).status == 403


@pytest.mark.parametrize(
    ("site", "may"),
    [("same-origin", True), ("none", True), ("cross-site", False), ("same-site", False), ("", False), ("new", False)],
)
def test_what_a_browser_calls_another_site_may_not_write(site: str, may: bool) -> None:
    for headers in ({**HERE, "sec-fetch-site": site}, bearer(ALICE, **{"sec-fetch-site": site})):
        if may:
            identify("127.0.0.1", headers, TOKENS)
        else:
            error = denied("127.0.0.1", headers)
            assert error.status == 403
            assert "Sec-Fetch-Site" in error.detail


# --- writing with a token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_host", ["127.0.0.1", "10.0.0.9", None])
@pytest.mark.parametrize(("token", "name"), [(ALICE, "alice"), (BOB, "bob"), (ADMIN, "admin")])
def test_a_token_proves_a_name_from_anywhere(client_host: str | None, token: str, name: str) -> None:
    # Also on the machine itself: who shows a token acts for that name and for no other.
    assert identify(client_host, bearer(token), TOKENS) == Caller(
        name=name, is_local=False, role=Role.ADMINISTRATOR if name == "admin" else Role.USER
    )


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer ", " Bearer"])
def test_the_scheme_is_read_in_any_case(scheme: str) -> None:
    assert identify(None, {"authorization": f"{scheme} {ALICE} "}, TOKENS).name == "alice"


NO_TOKEN = [
    "",
    "Bearer",
    "Bearer ",
    f"Bearer{ALICE}",
    f"Basic {ALICE}",
    ALICE,
    f"Bearer {ALICE} {BOB}",
    f"Bearer {ALICE}\n x",
]


@pytest.mark.parametrize("authorization", [*NO_TOKEN, f"Bearer {ALICE}, Bearer {BOB}", f"Bearer\t{ALICE}", "Bearer é"])
def test_a_header_that_cannot_be_read_is_never_taken_for_none(authorization: str) -> None:
    error = denied("127.0.0.1", {**HERE, "authorization": authorization})
    assert error.status == 401
    assert "must read: Bearer" in error.detail


@pytest.mark.parametrize(
    ("tokens", "why"), [(TOKENS, "not known, or no longer"), (UNSET, "has no tokens"), (BROKEN, "cannot be read")]
)
def test_an_unknown_token_is_never_taken_for_none(tokens: Tokens, why: str) -> None:
    error = denied("127.0.0.1", {**HERE, "authorization": "Bearer stale-token"}, tokens)
    assert error.status == 401
    assert why in error.detail
    assert "stale-token" not in str(error)
    assert error.headers == {"WWW-Authenticate": 'Bearer realm="gpu-worker-pool", error="invalid_token"'}


def test_with_broken_tokens_no_token_works() -> None:
    assert denied("10.0.0.9", bearer(ADMIN), BROKEN).status == 401
    assert BROKEN.names == frozenset()


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


@given(st.text(st.characters()))
def test_no_text_makes_parsing_raise_anything_but_a_value_error(text: str) -> None:
    try:
        tokens = Tokens.parse(text)
    except UnicodeError:
        raise  # a ValueError, too, but one that would show what it is about
    except ValueError:
        return
    assert not tokens.is_broken
