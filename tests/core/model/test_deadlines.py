"""What is due when."""

from __future__ import annotations

from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.core.model.deadlines import Deadlines


def deadlines(**due_at: float) -> Deadlines:
    noted = Deadlines()
    for id_, at in due_at.items():
        noted.set(id_, at)
    return noted


def test_nothing_is_due_on_an_empty_agenda() -> None:
    assert list(deadlines().due(1e9)) == []
    assert deadlines().next_due_at() == inf


def test_what_is_due_comes_longest_overdue_first() -> None:
    assert list(deadlines(a=30, b=10, c=20).due(30)) == ["b", "c", "a"]


def test_what_is_due_at_this_instant_is_due() -> None:
    assert list(deadlines(a=10).due(10)) == ["a"]


def test_what_is_not_due_yet_is_left_out() -> None:
    assert list(deadlines(a=10, b=10.1).due(10)) == ["a"]


def test_those_due_at_one_time_come_by_their_ids() -> None:
    assert list(deadlines(b=10, a=10).due(10)) == ["a", "b"]


def test_the_next_time_to_look_is_the_earliest() -> None:
    assert deadlines(a=30, b=10).next_due_at() == 10


def test_a_new_time_replaces_the_old_one() -> None:
    noted = deadlines(a=10, b=20)

    noted.set("a", 30)

    assert (noted.due_at("a"), noted.next_due_at(), list(noted.due(30))) == (30, 20, ["b", "a"])


def test_what_was_dropped_is_never_due() -> None:
    noted = deadlines(a=10, b=10)

    noted.drop("a")

    assert list(noted.due(10)) == ["b"]


def test_something_due_at_zero_can_be_dropped() -> None:
    noted = deadlines(a=0.0)

    noted.drop("a")

    assert noted.next_due_at() == inf


def test_dropping_what_was_never_noted_changes_nothing() -> None:
    noted = deadlines(a=10)

    noted.drop("b")

    assert noted == deadlines(a=10)


def test_what_has_no_deadline_is_never_due() -> None:
    assert deadlines().due_at("a") is None


def test_agendas_are_equal_by_what_is_due_when() -> None:
    assert deadlines(a=10, b=20) == deadlines(b=20, a=10)
    assert deadlines(a=10) != deadlines(a=11)


def test_an_agenda_says_how_much_is_noted_and_what_comes_next() -> None:
    assert repr(deadlines(a=30, b=10)) == "<Deadlines: 2 noted, next at 10>"


IDS = st.sampled_from("abcdef")
TIMES = st.integers(0, 9).map(float)


@given(st.lists(st.one_of(st.tuples(st.just("set"), IDS, TIMES), st.tuples(st.just("drop"), IDS), TIMES), max_size=40))
def test_it_says_what_a_plain_dict_would(steps: list[Any]) -> None:
    """Also after many were put off, brought forward or dropped, and whatever was asked in between."""
    noted, plain = Deadlines(), dict[str, float]()
    for step in steps:
        match step:
            case ("set", id_, at):
                noted.set(id_, at)
                plain[id_] = at
            case ("drop", id_):
                noted.drop(id_)
                plain.pop(id_, None)
            case now:
                due = sorted((at, id_) for id_, at in plain.items() if at <= now)
                assert list(noted.due(now)) == [id_ for _, id_ in due]
        assert noted.next_due_at() == min(plain.values(), default=inf)
        assert {id_: noted.due_at(id_) for id_ in "abcdef"} == {id_: plain.get(id_) for id_ in "abcdef"}
