"""Figures with a bound: a number, or the ratio of two contenders that took turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.shared.results import Results, show
from benchmarks.shared.rounds import percentile, ratios

MOST_DIGITS = 6


def bounded(
    results: Results,
    figure_id: str,
    what: str,
    value: float | None,
    unit: str,
    *,
    most: float | None = None,
    least: float | None = None,
    spread: str = "",
    why: str,
) -> None:
    """Add a figure that is reached up to `most`, or from `least` on. For a value of None, `why` says why there is none."""
    bound = most if most is not None else least
    assert bound is not None, figure_id
    is_met = None if value is None else value <= bound if most is not None else value >= bound
    target = f"{'<=' if most is not None else '>='} {bound:g} {unit}".rstrip()
    results.figure(
        figure_id,
        what,
        value=value,
        unit=unit,
        target=target,
        is_met=is_met,
        spread=spread if value is not None else "",
        why=why,
        shown="" if value is None else f"{apart(value, bound)} {unit}".rstrip(),
    )


def apart(value: float, bound: float) -> str:
    """Format a value, with more digits than usual if it would else look the same as its bound."""
    texts = [show(value, digits) for digits in range(3, MOST_DIGITS + 1)]
    return next((text for text in texts if value == bound or float(text.replace(",", "")) != bound), texts[-1])


def ratio(
    results: Results,
    figure_id: str,
    what: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    most: float | None = None,
    least: float | None = None,
    spread: str = "",
    why: str,
    missing: str = "",
) -> None:
    """Add the median ratio of the rounds. Without values of either, it was not measured, and `missing` says why."""
    found = ratios(ours, theirs) if ours and theirs else []
    bounded(
        results,
        figure_id,
        what,
        statistics.median(found) if found else None,
        "x",
        most=most,
        least=least,
        spread="; ".join(filter(None, (middle_half(found), spread))) if found else "",
        why=why if found else missing or "the other contender cannot be measured here",
    )


def ratio_when_quiet_too(
    results: Results,
    figure_id: str,
    what: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    most: float,
    spread: str = "",
    why: str,
    missing: str,
) -> None:
    """Add the median ratio of the rounds. The quietest tenth of ours, relative to that of the other, must reach it too.

    On a busy disk both contenders wait, which hides what one of them adds.
    """
    target = f"at most {most:g} x, also for the quietest tenth of each"
    if not ours or not theirs:
        results.figure(figure_id, what, value=None, unit="x", target=target, is_met=None, why=missing)
        return
    found = ratios(ours, theirs)
    value, quiet = statistics.median(found), percentile(ours, 10) / percentile(theirs, 10)
    results.figure(
        figure_id,
        what,
        value=value,
        unit="x",
        target=target,
        is_met=max(value, quiet) <= most,
        spread="; ".join(
            filter(None, (middle_half(found), f"the quietest tenth of each: {apart(quiet, most)} x", spread))
        ),
        why=why,
        shown=f"{apart(value, most)} x",
    )


def middle_half(of_rounds: Sequence[float]) -> str:
    """Format the range of the middle half of the rounds."""
    if len(of_rounds) < 2:
        return "one round"
    low, _, high = statistics.quantiles(of_rounds, n=4, method="inclusive")
    return f"middle half of the rounds: {show(low)} to {show(high)} x"
