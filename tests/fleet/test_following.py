"""How a candidate follows the journal, and what becomes of an append whose answer was lost."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.fleet.following import Following
from gpu_worker_pool.core.fleet.leadership import (
    BEGINNING,
    Append,
    Deposed,
    JournalEnd,
    JournalSnapshot,
    LeaderRow,
    has_lost_commits,
    judge_append,
)


def end(position: int, history: int = 0) -> JournalEnd:
    """The end of one of several histories."""
    return JournalEnd(position, 1000 * history + position)


def at(position: int) -> Following:
    following = Following(snapshot_every=5)
    following.loaded(JournalSnapshot(end(position), ()))
    return following


@pytest.mark.parametrize(
    ("told", "is_missed"),
    [(end(9), False), (end(8), False), (end(7), True), (BEGINNING, True), (end(8, history=1), True)],
)
def test_a_journal_without_what_is_known_is_noticed_by_its_end(told: JournalEnd, is_missed: bool) -> None:
    following = at(8)
    assert following.misses(told) == is_missed
    following.reload("it led before")
    assert not following.misses(told), "it is read again anyway"


def test_a_follower_writes_snapshots_and_the_leader_only_if_they_are_twice_overdue() -> None:
    following = at(10)
    assert not following.is_snapshot_due(is_leader=False)
    following.written(end(15), 1)
    assert following.is_snapshot_due(is_leader=False)
    assert not following.is_snapshot_due(is_leader=True)
    following.written(end(20), 1)
    assert following.is_snapshot_due(is_leader=True)
    following.reload("its pool is to be dropped")
    assert not following.is_snapshot_due(is_leader=True)


APPEND = Append(epoch=3, term="mine", end=end(10), batch="b", count=2)


@pytest.mark.parametrize(
    ("epoch", "term", "told", "batch", "outcome"),
    [
        (3, "mine", end(12), "b", end(12)),
        (3, "mine", end(10), "a", None),
        (3, "mine", end(9), "a", "lost commits: its journal ends at event 9, and event 10 was written"),
        (3, "mine", end(10, history=1), "a", "lost commits"),
        (3, "mine", end(11), "c", "did not write that"),
        (3, "other", end(10), "a", "box leads in epoch 3"),
        (4, "other", end(12), "b", "box leads in epoch 4"),
        (2, "old", end(10), "a", "lost the claim of epoch 3"),
    ],
)
def test_the_row_tells_what_became_of_an_append(
    epoch: int, term: str, told: JournalEnd, batch: str, outcome: JournalEnd | str | None
) -> None:
    found = judge_append(APPEND, LeaderRow(epoch, term, "box", None, told, batch, 3.0, 1.7e9))
    if isinstance(outcome, str):
        assert isinstance(found, Deposed)
        assert outcome in found.reason
    else:
        assert found == outcome


def test_a_leader_notices_lost_commits_by_its_own_row_alone() -> None:
    row = LeaderRow(3, "mine", "box", None, end(9), "a", 3.0, 1.7e9)
    assert has_lost_commits(row, 3, "mine", end(10))
    assert not has_lost_commits(row, 3, "mine", end(9))
    assert not has_lost_commits(row, 3, "other", end(10))
