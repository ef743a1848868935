"""Tokens are a part of the pool's history, so that all servers of it know them."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import AccessToken, Role
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import Box, reading


def token(place: int = 1, name: str = "bob", role: Role = Role.USER, note: str = "") -> AccessToken:
    return AccessToken(f"{place:064x}", name, role, 1.7e9 + place, "root", note)


def add(box: Box, added: AccessToken) -> list[ev.Event]:
    return box.do(cmd.Configure("tokens", (added.digest,), added))


def revoke(box: Box, digest: str) -> list[ev.Event]:
    return box.do(cmd.Configure("tokens", (digest,)))


def test_tokens_outlast_a_condensed_history() -> None:
    box = Box(reading(0))
    for place in range(3):
        add(box, token(place))
    revoke(box, token(1).digest)

    restored = replay(PoolState(settings=box.state.settings), condense(box.state))

    assert restored.tokens == box.state.tokens
    assert len(restored.tokens) == 2


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"digest": "ab"}, "64 hexadecimal"),
        ({"digest": "AB" * 32}, "lower case"),
        ({"name": ""}, "1 to 64"),
        ({"name": "bob smith"}, "1 to 64"),
        ({"note": "x" * 201}, "200 printable"),
        ({"note": "two\nlines"}, "printable"),
    ],
)
def test_a_token_that_is_none_is_refused(parts: dict[str, str], why: str) -> None:
    whole = {"digest": "ab" * 32, "name": "bob", "note": "", **parts}

    with pytest.raises(ValueError, match=why):
        AccessToken(whole["digest"], whole["name"], Role.USER, 0.0, None, whole["note"])
