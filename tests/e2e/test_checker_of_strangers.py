"""The checker on what others do beside the workers: outsiders, a second server, a flood, a server that is away."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.scribe import Scribe


def outsider(scribe: Scribe, *, came: float, left: float) -> None:
    for what, at in (("outsider_came", came), ("outsider_left", left)):
        scribe.lines.append({"what": what, "at": at, "who": "nemesis", "uuid": "gpu0"})


def an_outsider_came_to_a_holder(scribe: Scribe) -> None:
    """The first grant may rest on a reading from before, the last comes when the outsider has left."""
    outsider(scribe, came=0.1, left=20.0)
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.gave_back("a", 1.0)
    scribe.asks("b", 1.0)
    scribe.answer("b", 9.0, "queued")
    scribe.took("b", 20.1, 2)


def local_holder(scribe: Scribe, who: str, at: float, fence: int = 1) -> None:
    """No TTL runs against its lease."""
    scribe.asks(who, at - 0.2)
    scribe.answer(who, at, "active", fence=fence, uuids=["gpu0"])
    scribe.say("took", at, who, uuids=["gpu0"], gpu_ids=[0], fence=fence)


def away(scribe: Scribe, at: float) -> None:
    scribe.lines.append({"what": "server_away", "at": at, "who": "nemesis"})


def second_server(scribe: Scribe, at: float, *granted: str) -> None:
    scribe.lines.append({"what": "second_server", "at": at, "who": "nemesis", "granted": granted})


def an_outage_in_which_only_remote_holders_give_up(scribe: Scribe) -> None:
    local_holder(scribe, "local", 0.2)
    scribe.asks("remote", 0.0)
    scribe.took("remote", 0.2, 2, "gpu1")
    away(scribe, 1.0)
    scribe.say("left", 2.1, "remote", left_at=2.1, why="gave up")
    scribe.gave_back("local", 90.0)


def an_outsider_is_elsewhere(scribe: Scribe) -> None:
    outsider(scribe, came=0.0, left=20.0)
    scribe.asks("a", 9.0)
    scribe.took("a", 9.2, 1, "gpu1")
    scribe.asks("b", 9.0, memory_mb=10.0)
    scribe.took("b", 9.3, 2)


@pytest.mark.parametrize(
    "write",
    [
        an_outsider_came_to_a_holder,
        an_outage_in_which_only_remote_holders_give_up,
        an_outsider_is_elsewhere,
    ],
)
def test_a_history_in_order_has_no_violation(write: Callable[[Scribe], None]) -> None:
    scribe = Scribe()
    write(scribe)

    assert scribe.found() == []


def granted_beside_an_outsider(scribe: Scribe) -> None:
    outsider(scribe, came=0.0, left=20.0)
    scribe.asks("a", 9.0)
    scribe.took("a", 9.2, 1)


def granted_beside_an_outsider_after_waiting(scribe: Scribe) -> None:
    outsider(scribe, came=1.0, left=20.0)
    scribe.asks("a", 0.0)
    scribe.answer("a", 9.0, "queued")
    scribe.took("a", 9.2, 1)


def granted_by_another_server(scribe: Scribe) -> None:
    second_server(scribe, 1.0, "gpu0")


def lost_by_outage(scribe: Scribe) -> None:
    local_holder(scribe, "a", 0.2)
    away(scribe, 1.0)
    scribe.say("lost", 61.0, "a", sent=60.9, reason="expired")


def given_up_by_a_local_holder(scribe: Scribe) -> None:
    local_holder(scribe, "a", 0.2)
    away(scribe, 1.0)
    scribe.say("left", 5.0, "a", left_at=5.0, why="gave up")


def starved(scribe: Scribe) -> None:
    scribe.lines.append({"what": "starved", "at": 1.0, "who": "nemesis", "lease": "a"})


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("outsider", granted_beside_an_outsider),
        ("outsider", granted_beside_an_outsider_after_waiting),
        ("second_server", granted_by_another_server),
        ("lost_by_outage", lost_by_outage),
        ("lost_by_outage", given_up_by_a_local_holder),
        ("starved", starved),
    ],
)
def test_each_violation_is_found(kind: str, write: Callable[[Scribe], None]) -> None:
    scribe = Scribe()
    write(scribe)

    assert kind in scribe.found()
