"""Many histories, and how to see one alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.fleet.simulation import simulate

# With both files of histories: 10,000.
HISTORIES = 10_000
AT_ONCE = 1_000
# Of a history nearly all stays reachable until it is over. To look for garbage meanwhile finds none, and takes a tenth of
# the time.
COLLECTED_AFTER = 8


@contextmanager
def collecting_seldom() -> Iterator[Callable[[int], None]]:
    """Garbage is collected only by the function that is given, which is called after each history."""

    def collect_after(seed: int) -> None:
        if seed % COLLECTED_AFTER == 0:
            gc.collect()

    gc.disable()
    try:
        yield collect_after
    finally:
        gc.enable()


def run_histories(first: int) -> None:
    with collecting_seldom() as collect_after:
        for seed in range(first, first + AT_ONCE):
            try:
                simulate(seed)
            except Exception as error:  # noqa: BLE001 - whatever it is, the seed must be told
                pytest.fail(f"{error!r}\nTo see it: python -m tests.fleet.simulation --seed {seed} --trace")
            collect_after(seed)
