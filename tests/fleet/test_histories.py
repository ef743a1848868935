"""Simulated histories of a fleet: whatever goes wrong, all promises are kept. The second half is in test_more_histories.py,
so that two workers share them.
"""

from __future__ import annotations

import pytest

from tests.fleet.histories import AT_ONCE, HISTORIES, run_histories
from tests.fleet.simulation import simulate


@pytest.mark.parametrize("first", range(0, HISTORIES // 2, AT_ONCE))
def test_every_promise_is_kept(first: int) -> None:
    run_histories(first)


def test_the_same_seed_gives_the_same_history() -> None:
    lines: list[list[str]] = [[], []]
    for told in lines:
        simulate(7, trace=told.append)

    assert lines[0] == lines[1]
    assert len(lines[0]) > 5
