"""Who is due when, and who stands where in the line."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.core.model.deadlines import Agenda
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.queue.waiting import WaitingLine
from tests.core.build import request


def agenda(**due_at: float) -> Agenda:
    noted = Agenda()
    for id_, at in due_at.items():
        noted.set(id_, at)
    return noted


def waiter(id_: str, seq: int, **wants: Any) -> QueuedLease:
    return QueuedLease(id_, request(**wants), seq, requested_at=0.0)


def line(*waiters: QueuedLease) -> WaitingLine:
    waiting = WaitingLine()
    for lease in waiters:
        waiting.join(lease)
    return waiting


# --- the agenda ----------------------------------------------------------------------------------------------------


def test_nothing_is_due_on_an_empty_agenda() -> None:
    assert list(agenda().due(1e9)) == []
    assert agenda().next_due_at() is None


def test_what_is_due_comes_longest_overdue_first() -> None:
    assert list(agenda(a=30, b=10, c=20).due(30)) == ["b", "c", "a"]


def test_what_is_due_at_this_instant_is_due() -> None:
    assert list(agenda(a=10).due(10)) == ["a"]


def test_what_is_not_due_yet_is_left_out() -> None:
    assert list(agenda(a=10, b=10.1).due(10)) == ["a"]


def test_those_due_at_one_time_come_by_their_ids() -> None:
    assert list(agenda(b=10, a=10).due(10)) == ["a", "b"]


def test_the_next_time_to_look_is_the_earliest() -> None:
    assert agenda(a=30, b=10).next_due_at() == 10


def test_a_new_time_replaces_the_old_one() -> None:
    noted = agenda(a=10, b=20)

    noted.set("a", 30)

    assert (noted.due_at("a"), noted.next_due_at(), list(noted.due(30))) == (30, 20, ["b", "a"])


def test_what_was_dropped_is_never_due() -> None:
    noted = agenda(a=10, b=10)

    noted.drop("a")

    assert list(noted.due(10)) == ["b"]


def test_something_due_at_zero_can_be_dropped() -> None:
    noted = agenda(a=0.0)

    noted.drop("a")

    assert noted.next_due_at() is None


def test_dropping_what_was_never_noted_changes_nothing() -> None:
    noted = agenda(a=10)

    noted.drop("b")

    assert noted == agenda(a=10)


def test_when_something_unknown_is_due_is_an_error() -> None:
    with pytest.raises(KeyError):
        agenda().due_at("a")


def test_agendas_are_equal_by_what_is_due_when() -> None:
    assert agenda(a=10, b=20) == agenda(b=20, a=10)
    assert agenda(a=10) != agenda(a=11)
    assert agenda() != {}


def test_an_agenda_says_how_much_is_noted_and_what_comes_next() -> None:
    assert repr(agenda(a=30, b=10)) == "<Agenda: 2 noted, next at 10>"


# --- the line ------------------------------------------------------------------------------------------------------


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

    assert [waiting.position(lease) for lease in (third, first, second)] == [1, 2, 3]


def test_those_behind_move_up_when_somebody_leaves() -> None:
    first, second = waiter("a", 1), waiter("b", 2)
    waiting = line(first, second)

    waiting.leave(first)

    assert (list(waiting), waiting.position(second), len(waiting)) == (["b"], 1, 1)


def test_those_who_wish_for_the_same_stand_in_a_line_of_their_own() -> None:
    a, b, c = waiter("a", 1), waiter("b", 2, gpus=2), waiter("c", 3, priority=1)

    by_wishes = line(a, b, c).by_wishes

    assert {wishes.gpus: [id_ for *_, id_ in alike] for wishes, alike in by_wishes.items()} == {
        1: ["c", "a"],
        2: ["b"],
    }


def test_who_leaves_leaves_nothing_behind() -> None:
    only = waiter("a", 1)
    waiting = line(only)

    waiting.leave(only)

    assert (waiting == WaitingLine(), waiting.by_wishes, len(waiting)) == (True, {}, 0)


def test_who_leaves_takes_nobody_alike_along() -> None:
    first, second = waiter("a", 1), waiter("b", 2)
    waiting = line(first, second)

    waiting.leave(second)

    assert waiting.by_wishes == {first.request.wishes: [(0, 1, "a")]}


def test_lines_are_equal_by_who_stands_where() -> None:
    assert line(waiter("a", 1), waiter("b", 2)) == line(waiter("b", 2), waiter("a", 1))
    assert line(waiter("a", 1)) != line(waiter("a", 2))
    assert line() != []


def test_a_line_says_how_many_wait_for_how_many_kinds_of_things() -> None:
    waiting = line(waiter("a", 1), waiter("b", 2), waiter("c", 3, gpus=2))

    assert repr(waiting) == "<WaitingLine: 3 waiting, 2 kinds of wishes>"
