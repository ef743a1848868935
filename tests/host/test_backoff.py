import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.host.backoff import Backoff

backoffs = st.builds(
    lambda first_s, factor, span: Backoff(first_s=first_s, factor=factor, max_s=first_s * span),
    st.floats(1e-6, 1e6),
    st.floats(1.0, 1e6),
    st.floats(1.0, 1e6),
)
jitters = st.floats(0.0, 1.0, exclude_max=True)
attempts = st.integers(0, 10**400)


def test_without_jitter_a_delay_is_half_of_the_exponential_one() -> None:
    backoff = Backoff(first_s=1.0, max_s=60.0)

    assert [backoff.delay_s(attempt, 0.0) for attempt in range(5)] == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_jitter_fills_the_upper_half() -> None:
    backoff = Backoff(first_s=8.0, max_s=60.0)

    assert [backoff.delay_s(0, jitter) for jitter in (0.0, 0.25, 0.5, 0.75)] == [4.0, 5.0, 6.0, 7.0]


def test_growth_follows_the_factor() -> None:
    backoff = Backoff(first_s=2.0, factor=3.0, max_s=1000.0)

    assert [backoff.delay_s(attempt, 0.0) for attempt in range(4)] == [1.0, 3.0, 9.0, 27.0]


def test_growth_stops_at_the_maximum() -> None:
    backoff = Backoff(first_s=1.0, max_s=5.0)

    assert [backoff.delay_s(attempt, 0.0) for attempt in range(5)] == [0.5, 1.0, 2.0, 2.5, 2.5]


@pytest.mark.parametrize("attempt", [1023, 1024, 10**6, 10**18, 10**400])
def test_a_huge_number_of_attempts_gives_the_maximum(attempt: int) -> None:
    assert Backoff(first_s=1.0, max_s=30.0).delay_s(attempt, 0.0) == 15.0


def test_a_factor_of_one_never_grows() -> None:
    backoff = Backoff(first_s=4.0, factor=1.0, max_s=30.0)

    assert {backoff.delay_s(attempt, 0.0) for attempt in (0, 1, 10**6, 10**400)} == {2.0}


@given(backoffs, attempts, jitters)
def test_every_delay_is_positive_finite_and_within_its_bounds(backoff: Backoff, attempt: int, jitter: float) -> None:
    delay_s = backoff.delay_s(attempt, jitter)

    assert 0.0 < backoff.first_s / 2 <= delay_s <= backoff.max_s < math.inf


@given(backoffs, attempts, jitters)
def test_a_later_attempt_never_waits_less(backoff: Backoff, attempt: int, jitter: float) -> None:
    assert backoff.delay_s(attempt, jitter) <= backoff.delay_s(attempt + 1, jitter)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first_s": 0.0, "max_s": 1.0}, "^first_s .* 1e-06 .* not 0.0"),
        ({"first_s": -1.0, "max_s": 1.0}, "^first_s .* not -1.0"),
        ({"first_s": 5e-324, "max_s": 1.0}, "^first_s .* not 5e-324"),
        ({"first_s": math.nan, "max_s": 1.0}, "^first_s .* not nan"),
        ({"first_s": math.inf, "max_s": math.inf}, "^first_s .* not inf"),
        ({"first_s": 1.0, "factor": 0.99, "max_s": 9.0}, "^factor .* at least 1, not 0.99"),
        ({"first_s": 1.0, "factor": math.nan, "max_s": 9.0}, "^factor .* not nan"),
        ({"first_s": 1.0, "factor": math.inf, "max_s": 9.0}, "^factor .* not inf"),
        ({"first_s": 1.0, "max_s": 0.5}, r"^max_s .* first_s \(1.0\) .* not 0.5"),
        ({"first_s": 1.0, "max_s": math.nan}, "^max_s .* not nan"),
        ({"first_s": 1.0, "max_s": math.inf}, "^max_s .* not inf"),
    ],
)
def test_a_bad_setting_is_refused_by_name_value_and_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Backoff(**settings)


def test_a_negative_attempt_is_refused() -> None:
    with pytest.raises(ValueError, match="attempt must be 0 or more, not -1"):
        Backoff(first_s=1.0, max_s=2.0).delay_s(-1, 0.0)


@pytest.mark.parametrize("jitter", [-0.1, 1.0, math.nan, math.inf])
def test_jitter_outside_its_range_is_refused(jitter: float) -> None:
    with pytest.raises(ValueError, match=r"jitter must be in \[0, 1\)"):
        Backoff(first_s=1.0, max_s=2.0).delay_s(0, jitter)
