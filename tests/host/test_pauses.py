"""How long to wait before trying again."""

from __future__ import annotations

import pytest

from gpu_worker_pool.host.pauses import Backoff


@pytest.mark.parametrize(
    ("backoff", "jitter", "delays_s"),
    [
        (Backoff(first_s=1.0, max_s=5.0), 0.0, [0.5, 1.0, 2.0, 2.5, 2.5]),
        (Backoff(first_s=1.0, max_s=5.0), 0.5, [0.75, 1.5, 3.0, 3.75, 3.75]),
        (Backoff(first_s=2.0, factor=3.0, max_s=1000.0), 0.0, [1.0, 3.0, 9.0, 27.0]),
        (Backoff(first_s=4.0, factor=1.0, max_s=30.0), 0.0, [2.0, 2.0]),
    ],
)
def test_delays_grow_by_the_factor_to_the_maximum_half_of_each_by_chance(
    backoff: Backoff, jitter: float, delays_s: list[float]
) -> None:
    assert [backoff.delay_s(attempt, jitter) for attempt in range(len(delays_s))] == delays_s
