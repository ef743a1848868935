"""Tokens as an operator writes them, and as they are found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.core.model.configured import AccessToken, Role
from gpu_worker_pool.server.http.tokens import Proven, Tokens, digest_of

ALICE, BOB, ADMIN = "alice-secret-token-1", "bob-secret-token-22", "admin-secret-token-333"

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
    assert {token: found[0] for token in owners if (found := tokens.find_digest(digest_of(token)))} == owners
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


class OnlyByKey(dict[str, Any]):
    """Is never gone through."""

    def __iter__(self) -> Any:
        raise AssertionError("it is searched")

    items = values = keys = __iter__


def test_a_token_is_found_by_its_digest_whatever_their_number() -> None:
    token = AccessToken(digest_of(BOB), "bob", Role.OPERATOR, 0.0)
    tokens = Tokens(OnlyByKey({digest_of(ALICE): "alice"}))
    tokens.added = lambda: OnlyByKey({digest_of(BOB): token})
    assert tokens.find_digest(digest_of(ALICE)) == Proven("alice", Role.USER)
    assert tokens.find_digest(digest_of(BOB)) == Proven("bob", Role.OPERATOR)
    assert tokens.find_digest(digest_of("x")) is None


@given(st.text(st.characters()))
def test_no_text_makes_parsing_raise_anything_but_a_value_error(text: str) -> None:
    try:
        tokens = Tokens.parse(text)
    except UnicodeError:
        raise  # a ValueError, too, but one that would show what it is about
    except ValueError:
        return
    assert not tokens.is_broken
