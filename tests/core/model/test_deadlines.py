"""What is due when."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.model.deadlines import Agenda


def agenda(**due_at: float) -> Agenda:
    noted = Agenda()
    for id_, at in due_at.items():
        noted.set(id_, at)
    return noted


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
