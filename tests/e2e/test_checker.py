"""The checker finds each violation in a history made by hand, and nothing in one that is in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.scribe import TTL_S, Scribe


def one_after_another(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.asks("b", 0.3)
    scribe.answer("b", 0.4, "queued", status=202)
    scribe.wrote("a", 0.5, 1, until=2.1)
    scribe.gave_back("a", 1.0)
    scribe.took("b", 1.3, 2)
    scribe.wrote("b", 1.4, 2, until=3.2)
    scribe.gave_back("b", 2.0)
    scribe.lines.append({"what": "final", "at": 9.0, "who": "nemesis", "leases": [], "gpus": ["free"]})


def stopped_holder_overstays(scribe: Scribe) -> None:
    """He still has his lock at 5.0, and writes when he wakes up at 6.0; his lease is over and he says so."""
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.asks("b", 0.3)
    scribe.took("b", 5.0, 2)
    scribe.say("witness_busy", 5.0, "b", uuid="gpu0")
    scribe.wrote("b", 5.1, 2, until=7.0)
    scribe.wrote("a", 6.0, 1, until=2.1)
    scribe.left("a", 6.1)
    scribe.answer("a", 6.3, "ended", call="DELETE", sent=6.2, end_reason="expired")
    scribe.gave_back("b", 6.5)


def dead_holder_is_replaced(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.killed("a", 0.5)
    scribe.asks("b", 0.3)
    scribe.took("b", 0.6, 2)
    scribe.gave_back("b", 1.0)


def sharers_fit(scribe: Scribe) -> None:
    for number, who in enumerate("ab"):
        scribe.asks(who, 0.0, memory_mb=50.0)
        scribe.took(who, 0.2 + number, number + 1)
    for who in "ab":
        scribe.gave_back(who, 1.5)


def important_ones_pass(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.answer("a", 0.2, "queued")
    scribe.asks("b", 1.0, priority=5)
    scribe.took("b", 1.2, 1)
    scribe.gave_back("b", 1.4)
    scribe.took("a", 1.8, 2)


def it_left_the_queue(scribe: Scribe) -> None:
    """Its sign of life came too late, so it lost its place."""
    scribe.asks("a", 0.0)
    scribe.answer("a", 0.2, "queued")
    scribe.asks("b", 1.0)
    scribe.answer("a", 4.0, "ended", end_reason="expired")
    scribe.took("b", 5.0, 1)


def a_waiter_that_was_not_there_is_passed_over(scribe: Scribe) -> None:
    """The call by which it would have taken the GPU up had no answer."""
    scribe.asks("a", 0.0)
    scribe.answer("a", 0.2, "queued")
    scribe.asks("b", 0.3)
    scribe.say("failed", 6.0, "a", lease="a", call="GET", sent=0.3, error="timed out")
    scribe.granted("b", 6.5, 2, "gpu0")
    scribe.granted("a", 7.0, 3, "gpu1")


def a_stopped_waiter_is_passed_over(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.answer("a", 0.2, "queued")
    scribe.asks("b", 0.3)
    scribe.granted("b", 6.5, 2, "gpu0")
    scribe.granted("a", 7.0, 3, "gpu1")


def told_503_and_did_not_come_back_in_time(scribe: Scribe) -> None:
    """The server released what it had granted in the meantime."""
    scribe.asks("a", 0.0)
    scribe.answer("a", 0.2, "queued")
    scribe.answer("a", 9.0, "ended", call="PUT", fence=1, end_reason="released", ended_by="the server")


@pytest.mark.parametrize(
    "write",
    [
        one_after_another,
        told_503_and_did_not_come_back_in_time,
        stopped_holder_overstays,
        dead_holder_is_replaced,
        sharers_fit,
        important_ones_pass,
        it_left_the_queue,
        a_waiter_that_was_not_there_is_passed_over,
        a_stopped_waiter_is_passed_over,
    ],
)
def test_a_history_in_order_has_no_violation(write: Callable[[Scribe], None]) -> None:
    scribe = Scribe()
    write(scribe)

    assert scribe.found() == []


def overlap(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.asks("b", 0.3)
    scribe.took("b", 2.0, 2)  # a is safe until 2.1


def overlap_after_renewal(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.renewed("a", 1.3)
    scribe.asks("b", 0.3)
    scribe.took("b", 3.0, 2)


def overlap_of_exclusive_and_shared(scribe: Scribe) -> None:
    scribe.asks("a", 0.0, memory_mb=10.0)
    scribe.took("a", 0.2, 1)
    scribe.asks("b", 0.3)
    scribe.took("b", 1.0, 2)


def overfull(scribe: Scribe) -> None:
    for number, who in enumerate("abc"):
        scribe.asks(who, 0.0, memory_mb=50.0)
        scribe.took(who, 0.2 + number / 10, number + 1)


def witness(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.gave_back("a", 0.5)
    scribe.asks("b", 0.6)
    scribe.took("b", 1.0, 2)
    scribe.say("witness_busy", 1.0, "b", uuid="gpu0")


def stale_write(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.asks("b", 0.0)
    scribe.wrote("b", 1.0, 2, until=3.0)
    scribe.wrote("a", 1.1, 1, until=3.0)


def same_fence(scribe: Scribe) -> None:
    for number, who in enumerate("ab"):
        scribe.asks(who, 0.0)
        scribe.granted(who, 0.2, 1, f"gpu{number}")


def fence_went_back(scribe: Scribe) -> None:
    """After a restart that forgot."""
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 7)
    scribe.gave_back("a", 0.5)
    scribe.asks("b", 1.0)
    scribe.granted("b", 1.2, 3, "gpu1")


def fence_went_back_on_a_gpu(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.asks("b", 0.0)
    scribe.took("a", 0.2, 7)
    scribe.gave_back("a", 0.5)
    scribe.took("b", 1.2, 3)


def second_grant(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.granted("a", 0.2, 1, "gpu0")
    scribe.granted("a", 0.4, 2, "gpu1")


def released_by_the_server_within_its_time(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.answer("a", 0.2, "queued")
    scribe.answer("a", 2.0, "ended", call="PUT", fence=1, end_reason="released", ended_by="the server")


def served_out_of_order(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.answer("a", 0.2, "queued")
    scribe.asks("b", 0.3)
    scribe.granted("b", 0.5, 1, "gpu0")
    scribe.granted("a", 0.6, 2, "gpu1")


def important_one_served_later(scribe: Scribe) -> None:
    scribe.asks("a", 0.0, priority=5)
    scribe.answer("a", 0.2, "queued")
    scribe.asks("b", 0.3)
    scribe.granted("b", 0.5, 1, "gpu0")
    scribe.granted("a", 0.6, 2, "gpu1")


def less_important_one_served_earlier(scribe: Scribe) -> None:
    """He came first, and still waited when the important one came."""
    scribe.asks("b", 0.0)
    scribe.answer("b", 0.2, "queued")
    scribe.asks("a", 0.3, priority=5)
    scribe.answer("a", 0.5, "queued")
    scribe.answer("b", 0.8, "queued", sent=0.6)
    scribe.granted("b", 1.0, 1, "gpu0")
    scribe.granted("a", 1.1, 2, "gpu1")


def passed_over_and_never_served(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.answer("a", 0.2, "queued")
    scribe.asks("b", 0.3)
    scribe.granted("b", 0.5, 1)
    scribe.answer("a", 0.8, "queued", sent=0.6)


def grant_forgotten(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.say("lost", 0.8, "a", sent=0.7, reason="unknown")


def grant_forgotten_by_the_time_it_is_given_back(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.left("a", 0.5)
    scribe.say("answered", 0.7, "a", call="DELETE", sent=0.6, status=404, uuids=[])


def place_forgotten(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.answer("a", 0.2, "queued")
    scribe.say("answered", 9.0, "a", call="GET", sent=8.9, status=404, uuids=[])


def ended_before_its_time(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.say("lost", 2.0, "a", sent=1.9, reason="holder_died")


def queued_again(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.answer("a", 0.5, "queued")


def left_the_queue_before_its_time(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.answer("a", 0.2, "queued")
    scribe.answer("a", 1.0, "ended", end_reason="expired")


def released_by_somebody_else(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.say("lost", 5.0, "a", sent=4.9, reason="released")


def resurrected(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.gave_back("a", 0.5)
    scribe.granted("a", 1.5, 1)


def queued_after_its_end(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.gave_back("a", 0.5)
    scribe.answer("a", 1.5, "queued", call="PUT")


def renewed_for_less(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.renewed("a", 1.0, TTL_S / 2)


def not_reused(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.killed("a", 0.5)
    scribe.asks("b", 0.3)
    scribe.took("b", 1.0, 2, "gpu1")


def death_unnoticed(scribe: Scribe) -> None:
    dead_holder_is_replaced(scribe)
    told = {"what": "death_unnoticed", "at": 2.0, "who": "nemesis", "lease": "a", "state": "active", "after_s": 1.5}
    scribe.lines.append(told)


def left_over(scribe: Scribe) -> None:
    scribe.lines.append({"what": "final", "at": 9.0, "who": "nemesis", "leases": ["a"], "gpus": ["leased"]})


def end_not_read(scribe: Scribe) -> None:
    scribe.lines.append({"what": "final", "at": 9.0, "who": "nemesis", "leases": [], "gpus": [], "is_read": False})


def refused(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.say("answered", 0.2, "a", call="PUT", sent=0.1, status=409, uuids=[], detail="other wishes")


def server_error(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.say("answered", 0.2, "a", call="PUT", sent=0.1, status=500, uuids=[])


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("held_twice", overlap),
        ("held_twice", overlap_after_renewal),
        ("held_twice", overlap_of_exclusive_and_shared),
        ("overfull", overfull),
        ("lock", witness),
        ("stale_write", stale_write),
        ("fence", same_fence),
        ("fence", fence_went_back),
        ("fence", fence_went_back_on_a_gpu),
        ("lost", second_grant),
        ("order", served_out_of_order),
        ("order", important_one_served_later),
        ("order", less_important_one_served_earlier),
        ("order", passed_over_and_never_served),
        ("lost", grant_forgotten),
        ("lost", grant_forgotten_by_the_time_it_is_given_back),
        ("lost", place_forgotten),
        ("lost", ended_before_its_time),
        ("lost", queued_again),
        ("lost", left_the_queue_before_its_time),
        ("lost", released_by_somebody_else),
        ("lost", released_by_the_server_within_its_time),
        ("resurrected", resurrected),
        ("resurrected", queued_after_its_end),
        ("short", renewed_for_less),
        ("dead_holder", not_reused),
        ("death_unnoticed", death_unnoticed),
        ("left_over", left_over),
        ("left_over", end_not_read),
        ("answer", refused),
        ("answer", server_error),
    ],
)
def test_each_violation_is_found(kind: str, write: Callable[[Scribe], None]) -> None:
    scribe = Scribe()
    write(scribe)

    assert kind in scribe.found()
