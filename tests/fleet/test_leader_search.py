"""How a box finds its leader."""

from __future__ import annotations

from gpu_worker_pool.server.agent.leader_search import (
    ASKED_AT_ONCE,
    AVOIDED_S,
    LEARNED_A_ROUND,
    PACE,
    AskBoxes,
    JoinLeader,
    LeaderSearch,
    PauseUntil,
)

ONE, TWO, THREE = "http://one:8000", "http://two:8000", "http://three:8000"


def after_pause(search: LeaderSearch, now: float, known: str | None = None) -> object:
    step = search.next_step(now, known)
    assert isinstance(step, PauseUntil)
    assert step.at > now
    return search.next_step(step.at, known)


def test_boxes_are_asked_until_one_knows_the_leader() -> None:
    search = LeaderSearch([ONE, TWO], 0.5)
    assert search.next_step(0.0, None) == AskBoxes((ONE, TWO))
    search.silent(ONE, "connection refused")
    assert search.told(TWO, THREE, 0.0)
    assert search.next_step(0.0, None) == JoinLeader(THREE)


def test_the_database_is_believed_before_all_boxes() -> None:
    search = LeaderSearch([ONE], 0.5)
    assert search.next_step(0.0, TWO) == JoinLeader(TWO)
    search.parted(TWO, "connection refused", 0.0)
    assert after_pause(search, 0.0, TWO) == JoinLeader(TWO)


def test_a_leader_that_the_database_names_newly_is_joined_without_a_pause() -> None:
    """Else a fleet would grant nothing for up to the longest pause after each take-over."""
    search, now = LeaderSearch([], 0.9), 0.0
    for _ in range(8):
        search.parted(ONE, "connection refused", now)
        step = search.next_step(now, ONE)
        assert isinstance(step, PauseUntil)
        assert search.next_step(now, TWO) == JoinLeader(TWO)
        now = step.at
    search.parted(TWO, "connection refused", now)
    assert isinstance(search.next_step(now, TWO), PauseUntil), "it was tried"


def test_a_round_without_a_leader_is_repeated_after_a_pause_that_grows_to_a_limit() -> None:
    search, now, pauses = LeaderSearch([ONE], 0.9), 0.0, []
    for _ in range(12):
        assert search.next_step(now, None) == AskBoxes((ONE,))
        assert not search.told(ONE, None, now)
        step = search.next_step(now, None)
        assert isinstance(step, PauseUntil)
        pauses.append(round(step.at - now, 6))
        now = step.at
    assert pauses == sorted(pauses)
    assert max(pauses) <= PACE.max_s
    assert search.trouble == "http://one:8000 answers, and knows no leader"


def test_after_a_leader_is_lost_it_is_asked_first_and_learned_boxes_last() -> None:
    search = LeaderSearch([ONE], 0.5)
    search.next_step(0.0, None)
    search.told(ONE, TWO, 0.0)
    search.joined(TWO)
    search.learn([ONE, TWO, THREE])
    search.parted(TWO, "the connection broke", 10.0)
    assert after_pause(search, 10.0) == AskBoxes((TWO, ONE, THREE))


def test_of_a_thousand_boxes_few_are_asked_in_a_round_and_others_in_the_next() -> None:
    """A thousand boxes without a leader would keep one another busy."""
    search = LeaderSearch([ONE, TWO], 0.5)
    search.learn(f"http://box{number}:8000" for number in range(1000))
    rounds: list[set[str]] = []
    now = 0.0
    for _ in range(3):
        asked: list[str] = []
        while isinstance(step := search.next_step(now, None), AskBoxes):
            assert len(step.urls) <= ASKED_AT_ONCE
            asked += step.urls
        assert isinstance(step, PauseUntil)
        now = step.at
        assert asked[:2] == [ONE, TWO]
        rounds.append(set(asked[2:]))
    assert [len(each) for each in rounds] == [LEARNED_A_ROUND] * 3
    assert len(set.union(*rounds)) == 3 * LEARNED_A_ROUND


def test_a_leader_that_went_silent_is_avoided_until_another_one_can_lead() -> None:
    """It may hang, and an attempt to join it would take as long as the patience with it."""
    candidate = LeaderSearch([], 0.0)
    candidate.parted(TWO, "the leader has said nothing for 3 s", 10.0, is_silent=True)
    assert isinstance(candidate.next_step(10.5, TWO), PauseUntil), "the database still names it"
    assert candidate.next_step(10.6, ONE) == JoinLeader(ONE)
    assert candidate.next_step(10.0 + AVOIDED_S, TWO) == JoinLeader(TWO), "it still leads: only the network was silent"


def test_a_box_that_cannot_lead_asks_others_while_its_leader_is_silent() -> None:
    search = LeaderSearch([TWO, ONE], 0.0)
    search.joined(TWO)
    search.parted(TWO, "the leader has said nothing for 3 s", 10.0, is_silent=True)
    assert after_pause(search, 10.0) == AskBoxes((ONE,))
    assert not search.told(ONE, TWO, 10.5)
    step = search.next_step(10.5, None)
    assert isinstance(step, PauseUntil)
    assert search.next_step(step.at, None) == AskBoxes((ONE,))
    assert search.told(ONE, THREE, step.at)
    assert not search.told(ONE, TWO, step.at), "another box has not heard yet"
    assert search.next_step(step.at, None) == JoinLeader(THREE)


def test_a_box_that_was_told_of_nobody_says_so() -> None:
    search = LeaderSearch([], 0.0)
    assert isinstance(search.next_step(5.0, None), PauseUntil)
    assert search.trouble == "no box of the fleet says who leads"


def test_many_boxes_do_not_ask_at_the_same_moment() -> None:
    found = set()
    for spread in (0.0, 0.25, 0.5, 0.75, 0.9):
        search = LeaderSearch([ONE], spread)
        search.parted(ONE, "the leader is gone", 100.0)
        step = search.next_step(100.0, None)
        assert isinstance(step, PauseUntil)
        found.add(step.at)
    assert len(found) == 5
