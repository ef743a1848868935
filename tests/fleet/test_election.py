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


def test_a_candidate_with_another_key_than_the_leader_stands_back() -> None:
    election = candidate(spread_s=0.0)
    election.stand_back(100.0)
    now = 100.0
    while isinstance((question := election.wake(now)[0]), ReadLeader):
        election.answered(question, row(-1.0), now)
        now = election.wake_at
    assert isinstance(question, ClaimLeadership)
    assert now == pytest.approx(100.0 + ElectionPace().stand_back_s)
