"""Rounds in which the contenders take turns, so that values of the same round can be compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.shared.results import duration, show

# Of 100 values, `percentile` takes the largest for the p99.
ENOUGH_FOR_P99 = 200


def in_turn(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return each contender's value of each round. Every other round goes backwards, so that no position gains."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for _ in range(rounds):
        for name in names:
            found[name].append(contenders[name]())
        names.reverse()
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that about `percent` of the values do not exceed."""
    return sorted(values)[min(int(len(values) * percent / 100), len(values) - 1)]


def spread(rounds: Sequence[float]) -> str:
    """Format the lowest and the highest round."""
    return f"{show(min(rounds))} to {show(max(rounds))}"


def spread_s(rounds: Sequence[float]) -> str:
    """Format the lowest and the highest round, in seconds."""
    return f"{duration(min(rounds))} to {duration(max(rounds))}"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratio of each round, because values of one round share its noise."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(ratios(ours, theirs))
