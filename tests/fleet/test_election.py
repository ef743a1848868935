"""One candidate's part in the election, question by question."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from math import inf

import pytest

from gpu_worker_pool.core.fleet.election import (
    ClaimLeadership,
    Election,
    ElectionPace,
    HandOverLeadership,
    LeadershipLost,
    LeadershipWon,
    ReadLeader,
    RenewLeadership,
)
from gpu_worker_pool.core.fleet.leadership import LeaderRow


def row(
    expires_in_s: float, *, epoch: int = 3, term: str = "other", wall_now: float = 1.7e9, head: int = 5
) -> LeaderRow:
    return LeaderRow(epoch, term, "c9", "http://c9", head, None, expires_in_s, wall_now)


def candidate(spread_s: float = 0.1) -> Election:
    numbers = count(1)
    return Election(lambda: f"t{next(numbers)}", ElectionPace(spread_s=spread_s))


def leader(*, won_at: float = 100.0) -> Election:
    """A leader whose claim was sent at this time."""
    election = candidate(spread_s=0.0)
    (read,) = election.wake(won_at)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(-1.0), won_at)
    (claim,) = election.wake(won_at)
    assert isinstance(claim, ClaimLeadership)
    won = row(3.0, epoch=4, term="t1")
    assert election.answered(claim, won, won_at + 0.01) == [LeadershipWon(4, "t1", won, won_at + 0.01)]
    election.open(4, "t1")
    return election


def test_a_candidate_first_reads_who_leads() -> None:
    assert candidate().wake(100.0) == [ReadLeader(1)]


def test_a_follower_polls_twice_a_second() -> None:
    election = candidate()
    (read,) = election.wake(100.0)
    assert isinstance(read, ReadLeader)

    assert election.answered(read, row(2.9), 100.02) == []

    assert election.wake_at == pytest.approx(100.52)
    assert election.wake(100.3) == []
    assert election.wake(100.53) == [ReadLeader(2)]


def test_a_follower_claims_at_the_told_expiry_and_its_own_spread() -> None:
    election = candidate(spread_s=0.1)
    (read,) = election.wake(100.0)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(0.2), 100.0)

    assert election.wake_at == pytest.approx(100.3)
    assert election.wake(election.wake_at) == [ClaimLeadership(2, "t1", seen_epoch=3)]


def test_a_claim_names_the_highest_epoch_ever_seen() -> None:
    election = candidate(spread_s=0.0)
    election.see_epoch(9)
    (read,) = election.wake(100.0)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(-1.0, epoch=3), 100.0)

    assert election.wake(100.0) == [ClaimLeadership(2, "t1", seen_epoch=9)]


def test_a_candidate_that_hears_nothing_claims_nothing() -> None:
    """Its claims might be carried out and keep the others from leading."""
    election = candidate()
    asked = [action for tenth in range(100) for action in election.wake(100.0 + tenth / 10)]

    assert {type(action) for action in asked} == {ReadLeader}


def test_a_refused_claim_is_followed_by_a_question() -> None:
    election = candidate(spread_s=0.0)
    (read,) = election.wake(100.0)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(-1.0), 100.0)
    (claim,) = election.wake(100.0)
    assert isinstance(claim, ClaimLeadership)

    assert election.answered(claim, None, 100.1) == []

    assert election.wake(100.1) == [ReadLeader(3)]
    assert election.leadership is None


def test_a_leader_may_act_only_once_its_take_over_is_written() -> None:
    election = leader()
    assert election.may_act(100.5)

    election = candidate(spread_s=0.0)
    (read,) = election.wake(100.0)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(-1.0), 100.0)
    (claim,) = election.wake(100.0)
    assert isinstance(claim, ClaimLeadership)
    election.answered(claim, row(3.0, epoch=4, term="t1"), 100.01)
    assert election.is_trusted(100.5)
    assert not election.may_act(100.5)
    election.open(3, "older")
    assert not election.may_act(100.5)


def test_trust_is_counted_from_the_send() -> None:
    election = leader(won_at=100.0)
    assert election.may_act(102.49)
    assert not election.may_act(102.5)

    (renew,) = election.wake(101.0)
    assert renew == RenewLeadership(3, 4, "t1")
    assert isinstance(renew, RenewLeadership)
    election.answered(renew, row(3.0, epoch=4, term="t1"), 101.9)

    assert election.may_act(103.49)
    assert not election.may_act(103.5)


def test_an_append_renews_trust_from_its_send() -> None:
    election = leader(won_at=100.0)
    election.appended(4, "t1", sent_at=101.0)
    assert election.may_act(103.4)
    assert not election.may_act(103.5)

    election.appended(4, "another term", sent_at=103.0)
    assert not election.may_act(103.5)


def test_a_leader_that_was_stopped_finds_out_before_it_acts() -> None:
    election = leader(won_at=100.0)
    (renew,) = election.wake(101.0)
    assert isinstance(renew, RenewLeadership)

    # SIGSTOP for an hour; the answer to the renewal is the first thing it sees.
    now = 4700.0
    assert not election.may_act(now)
    assert election.answered(renew, row(3.0, epoch=4, term="t1"), now) == []
    assert not election.may_act(now)
    lost, hand_over, read = election.wake(now)
    assert isinstance(lost, LeadershipLost)
    assert hand_over == HandOverLeadership(4, "t1")
    assert isinstance(read, ReadLeader)


def test_a_leader_without_answers_steps_down_when_its_trust_is_over() -> None:
    election = leader(won_at=100.0)
    actions = [action for tenth in range(10, 25) for action in election.wake(100.0 + tenth / 10)]
    assert {type(action) for action in actions} == {RenewLeadership}

    lost = election.wake(102.5)[0]

    assert lost == LeadershipLost(4, "no renewal got through to the database in time")
    assert not election.may_act(102.5)


def test_a_failed_renewal_is_tried_again_soon() -> None:
    election = leader(won_at=100.0)
    (renew,) = election.wake(101.0)
    assert isinstance(renew, RenewLeadership)
    election.failed(renew, 101.1)

    assert election.wake_at == pytest.approx(101.35)
    assert election.wake(101.35) == [RenewLeadership(4, 4, "t1")]


def test_a_refused_renewal_ends_the_leadership() -> None:
    election = leader(won_at=100.0)
    (renew,) = election.wake(101.0)
    assert isinstance(renew, RenewLeadership)

    (lost,) = election.answered(renew, None, 101.1)

    assert isinstance(lost, LeadershipLost)
    assert not election.may_act(101.1)


def test_answers_after_a_newer_question_are_ignored() -> None:
    election = leader(won_at=100.0)
    (old,) = election.wake(101.0)
    assert isinstance(old, RenewLeadership)
    (new,) = election.wake(102.0)  # the first has had no answer for a second
    assert isinstance(new, RenewLeadership)

    assert election.answered(old, None, 102.1) == []
    assert election.may_act(102.2)
    election.answered(new, row(3.0, epoch=4, term="t1"), 102.3)
    assert election.may_act(104.4)


def test_a_renewal_counts_from_its_send_however_late_its_answer_is() -> None:
    """The database was busy, or this process had no processor time."""
    election = leader(won_at=100.0)
    (old,) = election.wake(101.0)
    assert isinstance(old, RenewLeadership)
    (new,) = election.wake(102.0)
    assert isinstance(new, RenewLeadership)

    assert election.answered(old, row(3.0, epoch=4, term="t1"), 102.4) == []
    assert election.may_act(103.49)
    assert not election.may_act(103.5)
    # It is the newer question that is waited for.
    assert election.wake(102.5) == []
    assert election.answered(new, row(3.0, epoch=4, term="t1"), 103.2) == []
    assert election.may_act(104.49)

    assert election.answered(old, row(3.0, epoch=4, term="another"), 103.3) == []
    assert not election.may_act(104.5)


def test_a_claim_whose_answer_was_lost_is_found_in_the_row_and_renewed() -> None:
    election = candidate(spread_s=0.0)
    (read,) = election.wake(100.0)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(-1.0), 100.0)
    (claim,) = election.wake(100.0)
    assert isinstance(claim, ClaimLeadership)
    election.failed(claim, 101.0)
    (again,) = election.wake(101.5)
    assert isinstance(again, ReadLeader)
    election.answered(again, row(1.5, epoch=4, term="t1"), 101.5)

    (renew,) = election.wake(101.5)
    assert renew == RenewLeadership(4, 4, "t1")
    assert isinstance(renew, RenewLeadership)
    told = row(3.0, epoch=4, term="t1")
    assert election.answered(renew, told, 101.6) == [LeadershipWon(4, "t1", told, 101.6)]
    assert election.is_trusted(103.9)
    assert not election.is_trusted(104.0)


def test_a_term_that_was_lost_is_never_taken_up_again() -> None:
    """An append of it may still be under way."""
    election = leader(won_at=100.0)
    _, _, read = election.wake(102.5)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(0.4, epoch=4, term="t1"), 102.5)

    assert election.wake(102.6) == []
    assert election.wake(102.9) == [ClaimLeadership(4, "t2", seen_epoch=4)]


def test_a_clean_stop_hands_over_and_claims_nothing_more() -> None:
    election = leader(won_at=100.0)
    election.retire()
    assert election.may_act(100.5)
    assert election.wake(101.0) == [RenewLeadership(3, 4, "t1")]

    assert election.stop() == [HandOverLeadership(4, "t1")]
    assert not election.may_act(101.0)
    assert election.wake_at == inf
    assert election.wake(200.0) == []


def test_a_leader_that_retires_and_loses_its_trust_is_done() -> None:
    election = leader(won_at=100.0)
    election.retire()

    assert [type(action) for action in election.wake(103.0)] == [LeadershipLost, HandOverLeadership]
    assert election.wake_at == inf


def test_a_follower_that_stops_has_nothing_to_hand_over() -> None:
    election = candidate()
    election.retire()

    assert election.wake(100.0) == []
    assert election.stop() == []


def test_a_notice_of_a_change_makes_a_follower_ask_at_once() -> None:
    election = candidate()
    (read,) = election.wake(100.0)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(2.9), 100.0)

    election.nudge(100.1)

    assert election.wake(100.1) == [ReadLeader(2)]


def test_a_leadership_that_lasts_for_too_long_is_claimed_when_nobody_renews_it() -> None:
    """The database's clock was set back by an hour, and the leader is gone."""
    election = candidate(spread_s=0.0)
    now, claims = 100.0, []
    for _ in range(10):
        (question,) = election.wake(now)
        if isinstance(question, ClaimLeadership):
            claims.append(now)
            break
        assert isinstance(question, ReadLeader)
        election.answered(question, row(3600.0 - (now - 100.0), wall_now=1.7e9 + now - 100.0), now)
        now = election.wake_at

    assert claims
    assert 103.0 < claims[0] < 104.0


def test_a_leadership_that_lasts_for_too_long_is_left_alone_while_it_is_renewed() -> None:
    election = candidate(spread_s=0.0)
    now = 100.0
    for number in range(20):
        (question,) = election.wake(now)
        assert isinstance(question, ReadLeader)
        election.answered(question, row(3600.0 + number, wall_now=1.7e9 + now), now)
        now = election.wake_at


def test_a_leader_that_is_told_to_step_down_does_so_once() -> None:
    election = leader(won_at=100.0)

    assert election.step_down(3, "older", "why", 100.5) == []
    assert election.step_down(4, "t1", "why", 100.5) == [LeadershipLost(4, "why")]
    assert election.step_down(4, "t1", "why", 100.5) == []


def test_after_a_failover_a_candidate_that_did_not_lead_last_waits() -> None:
    """The standby may have been behind. Only the last leader surely knows what clients were told."""
    election = candidate(spread_s=0.1)
    moved = replace(row(-1.0), has_moved=True)
    asked: list[object] = []
    now = 100.0
    while not any(isinstance(each, ClaimLeadership) for each in asked):
        (question,) = election.wake(now)
        asked.append(question)
        if isinstance(question, ReadLeader):
            election.answered(question, moved, now)
            now = election.wake_at

    assert now == pytest.approx(100.0 + ElectionPace().head_start_s)


@pytest.mark.parametrize(("known_head", "share"), [(5, 1.0), (6, 0.5)])
def test_of_the_others_one_that_knows_more_than_the_standby_goes_first(known_head: int, share: float) -> None:
    election = candidate(spread_s=0.0)
    (read,) = election.wake(100.0)
    assert isinstance(read, ReadLeader)
    election.known_head = known_head
    election.answered(read, replace(row(-1.0, head=5), has_moved=True), 100.0)

    assert election._free_at(replace(row(-1.0, head=5), has_moved=True), 100.0) == 100.0 + 6.0 * share


def leader_that_reads() -> tuple[Election, ReadLeader]:
    """A leader whose renewal was refused, so that it reads who leads."""
    election = leader(won_at=100.0)
    (renew,) = election.wake(101.1)
    assert isinstance(renew, RenewLeadership)
    election.answered(renew, None, 101.12)
    (read,) = election.wake(101.12)
    assert isinstance(read, ReadLeader)
    return election, read


def test_after_a_failover_the_last_leader_claims_at_once() -> None:
    election, read = leader_that_reads()
    election.answered(read, replace(row(-1.0, epoch=4, term="t1"), has_moved=True), 101.13)

    (claim,) = election.wake(101.13)
    assert isinstance(claim, ClaimLeadership)
    assert claim.seen_epoch == 4


def test_a_leader_whose_epoch_another_one_has_got_was_not_the_last() -> None:
    """The database lost the claim of the first one, so it counted its epoch again."""
    election, first = leader_that_reads()
    election.answered(first, replace(row(2.0, epoch=4, term="of another"), has_moved=True), 101.13)
    (read,) = election.wake(election.wake_at)
    assert isinstance(read, ReadLeader)
    election.answered(read, replace(row(-1.0, epoch=3, term="before"), has_moved=True), 102.0)

    (question,) = election.wake(election.wake_at)
    assert isinstance(question, ReadLeader), "the other one goes first"


def test_a_leader_of_an_earlier_epoch_was_not_the_last() -> None:
    election = leader(won_at=100.0)
    election.step_down(4, "t1", "deposed", 101.0)
    election.see_epoch(5)
    (read,) = election.wake(101.0)
    assert isinstance(read, ReadLeader)
    election.answered(read, replace(row(-1.0, epoch=4, term="t1"), has_moved=True), 101.0)

    assert isinstance(election.wake(election.wake_at)[0], ReadLeader)


def test_a_candidate_that_cannot_read_the_journal_lets_the_others_go_first() -> None:
    election = leader(won_at=100.0)

    assert election.fail_to_lead(4, "t1", "damaged", 101.0) == [
        LeadershipLost(4, "damaged"),
        HandOverLeadership(4, "t1"),
    ]
    (read,) = election.wake(101.0)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(-1.0, epoch=4, term="t1"), 101.0)

    assert election._free_at(row(-1.0), 101.0) == 107.0


def test_a_leader_of_an_epoch_that_boxes_do_not_obey_claims_a_later_one() -> None:
    """The database was put back, and boxes have seen later epochs than it knows."""
    election = leader(won_at=100.0)

    lost, handed_over = election.lead_later_epoch(9, "a box has seen epoch 9", 100.5)

    assert isinstance(lost, LeadershipLost)
    assert handed_over == HandOverLeadership(4, "t1")
    (read,) = election.wake(100.5)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(-1.0, epoch=4, term="t1"), 100.51)
    (claim,) = election.wake(100.51)
    assert isinstance(claim, ClaimLeadership)
    assert claim.seen_epoch == 9


def test_a_candidate_with_another_key_than_the_leader_stands_back() -> None:
    election = candidate(spread_s=0.0)
    election.stand_back(100.0)
    now = 100.0
    while isinstance((question := election.wake(now)[0]), ReadLeader):
        election.answered(question, row(-1.0), now)
        now = election.wake_at
    assert isinstance(question, ClaimLeadership)
    assert now == pytest.approx(100.0 + ElectionPace().stand_back_s)
