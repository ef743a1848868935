"""How a box finds its leader."""

from __future__ import annotations

from gpu_worker_pool.server.agent.leader_search import AVOIDED_S, LEARNED_A_ROUND, PACE, LeaderSearch

ONE, TWO, THREE = "http://one:8000", "http://two:8000", "http://three:8000"


def round_of(search: LeaderSearch, now: float) -> tuple[list[str], float]:
    """The boxes of a round, of which none knows the leader, and when the next round begins."""
    asked: list[str] = []
    while isinstance(step := search.next_step(now, None), str):
        asked.append(step)
        search.parted(step, f"{step} does not lead", now)
    return asked, step


def test_boxes_are_tried_until_one_names_the_leader() -> None:
    search = LeaderSearch([ONE, TWO], 0.5)
    assert search.next_step(0.0, None) == ONE
    search.parted(ONE, "connection refused", 0.0)
    assert search.next_step(0.0, None) == TWO
    search.parted(TWO, "it does not lead", 0.0, leader=THREE)
    assert search.next_step(0.0, None) == THREE
    search.parted(THREE, "connection refused", 0.0, leader=TWO)
    assert search.next_step(0.0, None) > 0.0, "they might name each other for ever"  # type: ignore[operator]


def test_the_database_is_believed_before_all_boxes_and_a_new_leader_is_joined_without_a_pause() -> None:
    """Else a fleet would grant nothing for up to the longest pause after each take-over."""
    search, now = LeaderSearch([THREE], 0.9), 0.0
    for _ in range(8):
        assert search.next_step(now, ONE) == ONE
        search.parted(ONE, "connection refused", now)
        step = search.next_step(now, ONE)
        assert isinstance(step, float)
        now = step
    assert search.next_step(now, TWO) == TWO
    search.parted(TWO, "connection refused", now)
    assert isinstance(search.next_step(now, TWO), float), "it was tried"


def test_a_round_without_a_leader_is_repeated_after_a_pause_that_grows_to_a_limit() -> None:
    search, now, pauses = LeaderSearch([ONE], 0.9), 0.0, []
    for _ in range(12):
        asked, next_at = round_of(search, now)
        assert asked == [ONE]
        pauses.append(round(next_at - now, 6))
        now = next_at
    assert pauses == sorted(pauses)
    assert max(pauses) <= PACE.max_s
    assert search.trouble == f"{ONE} does not lead"
    assert len({round_of(LeaderSearch([ONE], spread), 0.0)[1] for spread in (0.0, 0.25, 0.5, 0.75)}) == 4
    lonely = LeaderSearch([], 0.0)
    round_of(lonely, 0.0)
    assert lonely.trouble == "no box of the fleet says who leads"


def test_of_a_thousand_boxes_few_are_tried_in_a_round_the_last_leader_first_and_silent_ones_last() -> None:
    search = LeaderSearch([ONE, TWO], 0.5)
    search.learn(f"http://box{number}:8000" for number in range(1000))
    search.joined(THREE)
    search.parted(ONE, "no answer within 2 s", 0.0, is_silent=True)
    rounds, now = [], AVOIDED_S
    for _ in range(3):
        asked, now = round_of(search, now)
        assert (asked[:2], asked[-1]) == ([THREE, TWO], ONE)
        rounds.append(set(asked[2:-1]))
    assert len(set.union(*rounds)) == 3 * LEARNED_A_ROUND


def test_a_leader_that_went_silent_is_avoided_until_another_one_can_lead() -> None:
    """It may hang, and an attempt to join it would take as long as the patience with it."""
    candidate = LeaderSearch([], 0.0)
    candidate.joined(TWO)
    candidate.parted(TWO, "the leader has said nothing for 3 s", 10.0, is_silent=True)
    assert isinstance(candidate.next_step(10.5, TWO), float), "the database still names it"
    assert candidate.next_step(10.6, ONE) == ONE
    assert candidate.next_step(10.0 + AVOIDED_S, TWO) == TWO, "it still leads: only the network was silent"

    agent = LeaderSearch([TWO, ONE], 0.0)
    agent.joined(TWO)
    agent.parted(TWO, "the leader has said nothing for 3 s", 10.0, is_silent=True)
    assert agent.next_step(10.5, None) == ONE
    agent.parted(ONE, "it does not lead", 10.5, leader=TWO)
    assert isinstance(agent.next_step(10.5, None), float), "that box has not heard yet"
