"""Which waiter stands where in the line."""

from __future__ import annotations

from typing import Any

from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.waiting import LeaseQueue
from tests.core.build import request


def waiter(id_: str, seq: int, **wants: Any) -> QueuedLease:
    return QueuedLease(id_, request(**wants), seq, requested_at=0.0)


def line(*waiters: QueuedLease) -> LeaseQueue:
    waiting = LeaseQueue()
    for lease in waiters:
        waiting.join(lease)
    return waiting


def test_the_line_is_in_the_order_in_which_people_came() -> None:
    assert list(line(waiter("b", 1), waiter("a", 2))) == ["b", "a"]


def test_the_order_does_not_depend_on_when_somebody_joins() -> None:
    assert list(line(waiter("a", 2), waiter("b", 1))) == ["b", "a"]


def test_a_higher_priority_stands_ahead() -> None:
    assert list(line(waiter("a", 1), waiter("b", 2, priority=1), waiter("c", 3, priority=-1))) == [
        "b",
        "a",
        "c",
    ]


def test_the_next_one_is_at_position_one() -> None:
    first, second, third = waiter("a", 1), waiter("b", 2), waiter("c", 3, priority=1)
    waiting = line(first, second, third)

    assert [waiting.place_of(lease) for lease in (third, first, second)] == [1, 2, 3]


def test_those_behind_move_up_when_somebody_leaves() -> None:
    first, second = waiter("a", 1), waiter("b", 2)
    waiting = line(first, second)

    waiting.leave(first)

    assert (list(waiting), waiting.place_of(second), len(waiting)) == (["b"], 1, 1)


def lines_of(waiting: LeaseQueue) -> list[list[str]]:
    return [[id_ for *_, id_ in alike] for alike in waiting.lines.values()]


def test_those_who_ask_for_the_same_stand_in_a_line_of_their_own() -> None:
    waiters = [waiter("a", 1), waiter("b", 2, gpus=2), waiter("c", 3, priority=1)]
    waiters += [waiter("d", 4, time_limit_s=60.0), waiter("e", 5, preemptible=True)]

    assert lines_of(line(*waiters)) == [["c", "a"], ["b"], ["d"], ["e"]]


def test_owners_have_lines_of_their_own_where_they_are_not_alike() -> None:
    waiters = [waiter("a", 1, owner="ada"), waiter("b", 2, owner="bob"), waiter("c", 3, owner="ada")]
    waiting = line(*waiters)
    assert lines_of(waiting) == [["a", "b", "c"]]

    waiting.split_owners(True, waiters)

    assert lines_of(waiting) == [["a", "c"], ["b"]]
    assert list(waiting) == ["a", "b", "c"]


def test_who_leaves_leaves_nothing_behind() -> None:
    only = waiter("a", 1)
    waiting = line(only)

    waiting.leave(only)

    assert (waiting == LeaseQueue(), waiting.lines, len(waiting)) == (True, {}, 0)


def test_who_leaves_takes_nobody_alike_along() -> None:
    first, second = waiter("a", 1), waiter("b", 2)
    waiting = line(first, second)

    waiting.leave(second)

    assert waiting.lines == {waiting.line_of(first): [(False, 0, 1, "a")]}


def test_lines_are_equal_by_who_stands_where() -> None:
    assert line(waiter("a", 1), waiter("b", 2)) == line(waiter("b", 2), waiter("a", 1))
    assert line(waiter("a", 1)) != line(waiter("a", 2))
    assert line() != []


def test_a_line_says_how_many_wait_for_how_many_kinds_of_things() -> None:
    waiting = line(waiter("a", 1), waiter("b", 2), waiter("c", 3, gpus=2))

    assert repr(waiting) == "<LeaseQueue: 3 waiting, 2 lines>"
