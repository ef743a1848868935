"""One candidate's part in the election, question by question."""

from __future__ import annotations

from itertools import count

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
from gpu_worker_pool.core.fleet.leadership import JournalEnd, LeaderRow


def row(
    expires_in_s: float, *, epoch: int = 3, term: str = "other", wall_now: float = 1.7e9, head: int = 5
) -> LeaderRow:
    return LeaderRow(epoch, term, "c9", "http://c9", JournalEnd(head, head), None, expires_in_s, wall_now)


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


def test_a_follower_claims_at_the_told_expiry_and_its_own_spread() -> None:
    election = candidate(spread_s=0.1)
    (read,) = election.wake(100.0)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(0.2), 100.0)

    assert election.wake_at == pytest.approx(100.3)
    assert election.wake(election.wake_at) == [ClaimLeadership(2, "t1", seen_epoch=3)]


def test_a_candidate_that_hears_nothing_claims_nothing() -> None:
    """Its claims might be carried out and keep the others from leading."""
    election = candidate()
    asked = [action for tenth in range(100) for action in election.wake(100.0 + tenth / 10)]

    assert {type(action) for action in asked} == {ReadLeader}


def test_a_failed_renewal_is_tried_again_soon() -> None:
    election = leader(won_at=100.0)
    (renew,) = election.wake(101.0)
    assert isinstance(renew, RenewLeadership)
    election.failed(renew, 101.1)

    assert election.wake_at == pytest.approx(101.35)
    assert election.wake(101.35) == [RenewLeadership(4, 4, "t1")]


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


def test_a_notice_of_a_change_makes_a_follower_ask_at_once() -> None:
    election = candidate()
    (read,) = election.wake(100.0)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(2.9), 100.0)

    election.nudge(100.1)

    assert election.wake(100.1) == [ReadLeader(2)]


def test_a_candidate_that_cannot_read_the_journal_lets_the_others_go_first() -> None:
    election = leader(won_at=100.0)

    assert election.fail_to_lead(4, "t1", "damaged", 101.0) == [
        LeadershipLost(4, "damaged"),
        HandOverLeadership(4, "t1"),
    ]
    (read,) = election.wake(101.0)
    assert isinstance(read, ReadLeader)
    election.answered(read, row(-1.0, epoch=4, term="t1"), 101.0)

    assert election._free_at(row(-1.0)) == 107.0


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
