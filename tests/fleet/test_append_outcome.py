from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_worker_pool.core.fleet.append_outcome import (
    Append,
    AppendMissing,
    AppendWritten,
    CommitsLost,
    Deposed,
    head_went_back,
    judge_append,
)
from gpu_worker_pool.core.fleet.leadership import LeaderRow

APPEND = Append(epoch=4, term="mine", head=10, batch="b", count=2)
BEFORE = LeaderRow(4, "mine", "c0", None, head=10, batch="a", expires_in_s=2.0, wall_now=1.7e9)


def test_an_append_whose_answer_was_lost_was_written_if_the_row_has_its_id() -> None:
    assert judge_append(APPEND, replace(BEFORE, head=12, batch="b")) == AppendWritten(12)


def test_an_append_is_missing_if_the_head_is_where_it_was() -> None:
    assert judge_append(APPEND, BEFORE) == AppendMissing()


def test_a_head_that_went_back_tells_of_lost_commits() -> None:
    assert judge_append(APPEND, replace(BEFORE, head=7)) == CommitsLost(7)


def test_commits_are_lost_also_if_the_id_of_an_older_append_is_back() -> None:
    """A standby that has the same batch at an older head is still behind."""
    assert judge_append(APPEND, replace(BEFORE, head=7, batch="b")) == CommitsLost(7)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (replace(BEFORE, epoch=5, term="other", holder="c1"), "c1 leads in epoch 5"),
        (replace(BEFORE, term="other", holder=None), "another candidate leads in epoch 4"),
        (replace(BEFORE, epoch=3, term="older"), "the database lost the claim of epoch 4; it is at epoch 3 again"),
        (
            replace(BEFORE, head=11, batch="c"),
            "the journal ends at 11 instead of 10, and this leader did not write that",
        ),
        # Under another term the same id and head say nothing.
        (replace(BEFORE, epoch=5, term="other", holder="c1", head=12, batch="b"), "c1 leads in epoch 5"),
    ],
)
def test_a_leader_that_is_not_in_the_row_is_deposed(row: LeaderRow, reason: str) -> None:
    assert judge_append(APPEND, row) == Deposed(reason)


def test_an_answer_that_was_overtaken_tells_of_no_lost_commits() -> None:
    told = replace(BEFORE, head=10)

    assert not head_went_back(told, 4, "mine", written=10)  # 12 meanwhile, but not when it was asked for
    assert head_went_back(told, 4, "mine", written=12)
    assert not head_went_back(replace(told, term="other"), 4, "mine", written=12)
