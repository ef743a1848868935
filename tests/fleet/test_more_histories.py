"""The second half of test_histories.py."""

from __future__ import annotations

import pytest

from tests.fleet.histories import AT_ONCE, HISTORIES, run_histories


@pytest.mark.parametrize("first", range(HISTORIES // 2, HISTORIES, AT_ONCE))
def test_every_promise_is_kept(first: int) -> None:
    run_histories(first)
