"""The lots that benchmarks/balancing.py draws: how far off chance may be is what they say it is."""

from __future__ import annotations

import random
import statistics
from collections import Counter

import pytest

from benchmarks.balancing import Outcome, binomial, chance

REQUESTS = 600


def outcome_of(*promises: tuple[dict[str, float], int]) -> Outcome:
    """What was promised, so often each."""
    outcome = Outcome()
    for shares, times in promises:
        outcome.shares[tuple(shares.items())] += times
        outcome.promised.update({box: share * times for box, share in shares.items()})
    return outcome


@pytest.mark.parametrize(("trials", "share"), [(10, 0.3), (500, 0.5), (500, 0.02), (500, 0.99)])
def test_so_many_of_the_trials_succeed_as_should(trials: int, share: float) -> None:
    lot = random.Random(1)

    found = [binomial(lot, trials, share) for _ in range(2_000)]

    variance = trials * share * (1 - share)
    assert statistics.fmean(found) == pytest.approx(trials * share, abs=5 * (variance / 2_000) ** 0.5)
    assert statistics.variance(found) == pytest.approx(variance, rel=0.2)
    assert 0 <= min(found) <= max(found) <= trials
    assert (binomial(lot, trials, 0.0), binomial(lot, trials, 1.0)) == (0, trials)


def test_where_the_promise_is_always_the_same_the_chance_is_that_of_the_table() -> None:
    outcome = outcome_of(({"a": 0.5, "b": 0.3, "c": 0.2}, REQUESTS))
    counts = Counter(a=325, b=160, c=115)

    (found,) = outcome.chances(2_000, 1, counts)

    assert found == pytest.approx(chance(outcome.chi_square(counts), 2), abs=0.03)


def test_where_few_requests_leave_a_choice_the_table_would_let_a_broken_promise_pass() -> None:
    """Only forty may go to either box; all of them to the same one is no chance."""
    outcome = outcome_of(({"a": 1.0}, 280), ({"b": 1.0}, 280), ({"a": 0.5, "b": 0.5}, 40))
    counts = Counter(a=320, b=280)

    kept, broken = outcome.chances(1_000, 1, Counter(a=300, b=300), counts)

    assert kept == 1.0
    assert broken < 0.01
    assert chance(outcome.chi_square(counts), 1) > 0.05
