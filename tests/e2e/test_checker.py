"""The checker finds each violation in a history made by hand, and nothing in one that is in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpu_worker_pool.history_check import check
from gpu_worker_pool.run_history import Line, RunHistory

TTL_S = 3.0
BEAT_S = 1.0


class Scribe:
    """Writes histories. Times are seconds; a worker's name is its lease's."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.resources: dict[str, list[Line]] = {}

    def say(self, what: str, at: float, who: str, **facts: Any) -> None:
        self.lines.append({"what": what, "at": at, "who": who, "lease": who, **facts})

    def asks(self, who: str, at: float, **wishes: Any) -> None:
        told = {"turn": 1, "gpus": 1, "memory_mb": None, "priority": 0, "ttl_s": TTL_S, **wishes}
        self.say("asks", at, who, **told)

    def answer(
        self, who: str, at: float, state: str, *, call: str = "GET", sent: float | None = None, **facts: Any
    ) -> None:
        told = {"call": call, "sent": at - 0.1 if sent is None else sent, "status": 200, "uuids": [], **facts}
        self.say("answered", at, who, state=state, **told)

    def granted(self, who: str, at: float, fence: int, gpu: str = "gpu0") -> None:
        self.answer(who, at, "active", fence=fence, uuids=[gpu], until=at - 0.1 + TTL_S - BEAT_S)

    def took(self, who: str, at: float, fence: int, gpu: str = "gpu0") -> None:
        self.granted(who, at, fence, gpu)
        self.say("took", at, who, uuids=[gpu], gpu_ids=[int(gpu[-1])], fence=fence, until=at - 0.1 + TTL_S - BEAT_S)

    def renewed(self, who: str, at: float, left_s: float = TTL_S) -> None:
        self.say("renewed", at, who, sent=at - 0.1, left_s=left_s, until=at - 0.1 + left_s - BEAT_S)

    def left(self, who: str, at: float) -> None:
        self.say("left", at, who, left_at=at, why="done")

    def gave_back(self, who: str, at: float) -> None:
        self.left(who, at)
        self.answer(who, at + 0.2, "ended", call="DELETE", sent=at + 0.1, end_reason="released")

    def killed(self, who: str, at: float) -> None:
        self.lines.append({"what": "killed", "at": at, "who": "nemesis", "worker": who, "reaped_at": at + 0.01})

    def wrote(self, who: str, at: float, fence: int, *, until: float, gpu: str = "gpu0") -> None:
        number = sum(len(lines) for lines in self.resources.values())
        self.resources.setdefault(gpu, []).append({"fence": fence, "lease": who, "write": number})
        self.say("wrote", at, who, uuid=gpu, write=number, before=at - 0.001, until=until)

    def found(self) -> list[str]:
        return [violation.kind for violation in check(RunHistory(self.lines, self.resources, usable_mb=100.0))]


def one_inside_another(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.asks("inner", 0.3, parent="a")
    scribe.took("inner", 0.4, 2)
    scribe.asks("innermost", 0.5, parent="inner", memory_mb=10.0)
    scribe.took("innermost", 0.6, 3)
    scribe.gave_back("innermost", 0.7)
    scribe.gave_back("a", 1.0)
    scribe.answer("inner", 1.1, "ended", end_reason="released")


def two_inside_one(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    for fence, who in enumerate(("b", "c"), start=2):
        scribe.asks(who, 0.3, parent="a")
        scribe.took(who, 0.4 + fence / 10, fence)


def a_stranger_beside_one_inside(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.asks("inner", 0.3, parent="a")
    scribe.took("inner", 0.4, 2)
    scribe.say("left", 0.5, "a", left_at=0.5, why="done")
    scribe.asks("stranger", 0.6)
    scribe.took("stranger", 0.7, 3)


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


def inside_a_lease_that_was_there_before_the_outsider(scribe: Scribe) -> None:
    outsider(scribe, came=1.0, left=20.0)
    local_holder(scribe, "a", 0.2)
    scribe.asks("inner", 9.0, parent="a")
    scribe.took("inner", 9.2, 2)


def local_holder(scribe: Scribe, who: str, at: float, fence: int = 1) -> None:
    """No TTL runs against its lease."""
    scribe.asks(who, at - 0.2)
    scribe.answer(who, at, "active", fence=fence, uuids=["gpu0"])
    scribe.say("took", at, who, uuids=["gpu0"], gpu_ids=[0], fence=fence)


def away(scribe: Scribe, at: float) -> None:
    scribe.lines.append({"what": "server_away", "at": at, "who": "nemesis"})


def second_server(scribe: Scribe, at: float, *granted: str, **facts: object) -> None:
    scribe.lines.append({"what": "second_server", "at": at, "who": "nemesis", "granted": granted, **facts})


def an_outage_in_which_only_remote_holders_give_up(scribe: Scribe) -> None:
    local_holder(scribe, "local", 0.2)
    scribe.asks("remote", 0.0)
    scribe.took("remote", 0.2, 2, "gpu1")
    away(scribe, 1.0)
    scribe.say("left", 2.1, "remote", left_at=2.1, why="gave up")
    scribe.gave_back("local", 90.0)


def a_server_takes_over_what_is_free(scribe: Scribe) -> None:
    """The GPU of a remote holder is among it, and that of a local one who has left, or got it later."""
    local_holder(scribe, "a", 0.2)
    away(scribe, 1.0)
    second_server(scribe, 3.0, "gpu1", since=2.0, has_taken_over=True)
    scribe.left("a", 4.0)
    second_server(scribe, 5.0, "gpu0", since=2.0, has_taken_over=True)
    local_holder(scribe, "b", 6.0, fence=2)
    second_server(scribe, 7.0, "gpu0", since=5.5, has_taken_over=True)


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
        an_outsider_is_elsewhere,
        an_outage_in_which_only_remote_holders_give_up,
        a_server_takes_over_what_is_free,
        inside_a_lease_that_was_there_before_the_outsider,
        one_after_another,
        one_inside_another,
        stopped_holder_overstays,
        dead_holder_is_replaced,
        sharers_fit,
        important_ones_pass,
        it_left_the_queue,
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


def refused(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.say("answered", 0.2, "a", call="PUT", sent=0.1, status=409, uuids=[], detail="other wishes")


def server_error(scribe: Scribe) -> None:
    scribe.asks("a", 0.0)
    scribe.say("answered", 0.2, "a", call="PUT", sent=0.1, status=500, uuids=[])


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


def taken_over_from_a_living_holder(scribe: Scribe) -> None:
    local_holder(scribe, "a", 0.2)
    second_server(scribe, 2.0, "gpu0", since=1.0, has_taken_over=True)


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
        ("second_server", taken_over_from_a_living_holder),
        ("lost_by_outage", lost_by_outage),
        ("lost_by_outage", given_up_by_a_local_holder),
        ("starved", starved),
        ("held_twice", overlap),
        ("held_twice", two_inside_one),
        ("held_twice", a_stranger_beside_one_inside),
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
        ("resurrected", resurrected),
        ("resurrected", queued_after_its_end),
        ("short", renewed_for_less),
        ("dead_holder", not_reused),
        ("death_unnoticed", death_unnoticed),
        ("left_over", left_over),
        ("answer", refused),
        ("answer", server_error),
    ],
)
def test_each_violation_is_found(kind: str, write: Callable[[Scribe], None]) -> None:
    scribe = Scribe()
    write(scribe)

    assert kind in scribe.found()
