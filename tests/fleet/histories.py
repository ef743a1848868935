"""Many histories, and how to see one alone."""

from __future__ import annotations

import pytest

from tests.fleet.simulation import simulate

# With both files of histories: 10,000.
HISTORIES = 10_000
AT_ONCE = 1_000


def run_histories(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        try:
            simulate(seed)
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed must be told
            pytest.fail(f"{error!r}\nTo see it: python -m tests.fleet.simulation --seed {seed} --trace")
