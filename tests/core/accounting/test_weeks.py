"""GPU time by owner and week."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.accounting.usage import US_PER_S, LeaseTimes
from gpu_worker_pool.core.accounting.weeks import WeeklyUsage

WEEK_S = 7 * 86_400.0
STARTS = [1e9, 1e9 + WEEK_S, 1e9 + 2 * WEEK_S]
NOW = STARTS[-1] + 3600


def held(owner: str, granted: float | None, ended: float | None, *, gpus: int = 1, is_live: bool = False) -> LeaseTimes:
    return LeaseTimes(owner, gpus, False, granted, granted, ended, is_live=is_live)


def hours_of(weekly: WeeklyUsage) -> dict[str | None, list[float]]:
    return {owner: [us / US_PER_S / 3600 for us in weeks] for owner, weeks in weekly.by_owner.items()}


def test_a_lease_counts_in_each_week_in_which_it_held_gpus() -> None:
    weekly = WeeklyUsage(STARTS, NOW)
    weekly.count(held("ada", STARTS[0] - 7200, STARTS[0] + 3600, gpus=2))
    weekly.count(held("ada", STARTS[1] - 3600, STARTS[1] + 7200))
    weekly.count(held("bob", STARTS[2] - 3600, None, is_live=True))
    weekly.count(held("old", STARTS[0] - 7200, STARTS[0] - 3600))
    weekly.count(LeaseTimes("waits", 0, False, STARTS[0], None, STARTS[1]))

    assert hours_of(weekly) == {"ada": [3.0, 2.0, 0.0], "bob": [0.0, 1.0, 1.0]}
    assert [us / US_PER_S / 3600 for us in weekly.totals()] == [3.0, 3.0, 1.0]
    assert weekly.unknown_leases == 0


def test_unknown_times_are_counted_apart_and_not_as_zero() -> None:
    weekly = WeeklyUsage(STARTS, NOW)
    weekly.count(held("ada", None, STARTS[1]))
    weekly.count(held("ada", STARTS[1], STARTS[1] - 60))
    weekly.count(held("ada", STARTS[1], None))
    weekly.count(held("ada", None, STARTS[0] - 60))  # before all weeks

    assert (weekly.by_owner, weekly.unknown_leases) == ({}, 3)
    assert weekly.totals() == [0, 0, 0]


@pytest.mark.parametrize("starts", [[], [2.0, 1.0], [1.0, 1.0], [NOW + 1]])
def test_weeks_that_are_not_in_order_are_refused(starts: list[float]) -> None:
    with pytest.raises(ValueError, match="each must begin before the next and now"):
        WeeklyUsage(starts, NOW)
