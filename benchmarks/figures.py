"""What a part of the benchmarks measures: figures, and the contenders that it had to leave out.

Each part is a program, `python -m benchmarks.PART [--quick] [--json FILE]`, that makes one `Results` and finishes it.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.targets import BY_ID, RATIO, Target

ROOT = Path(__file__).parent.parent
NOT_KNOWN = "-"


@dataclass(frozen=True)
class Figure:
    """A measured number. `ratio` is ours divided by `beside`, what it was measured beside in the same rounds.

    `low` and `high` are those of the rounds: of the ratio if there is one, else of the value.
    """

    value: float
    unit: str
    low: float
    high: float
    rounds: int
    ratio: float | None = None
    beside: float | None = None
    beside_name: str = ""
    note: str = ""


@dataclass
class Results:
    """What one part has measured."""

    part: str
    figures: dict[str, Figure] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, figure_id: str, figure: Figure) -> None:
        """Keep a figure of the list in targets.py, and print it."""
        target = BY_ID[figure_id]
        assert target.part == self.part, f"{figure_id} belongs to {target.part}"
        self.figures[figure_id] = figure
        print(f"{target.what}: {' | '.join(cells(target, figure))}", flush=True)

    def leave_out(self, what: str, why: str) -> None:
        """Note what could not be measured, and why."""
        self.left_out[what] = why
        print(f"left out: {what}: {why}", flush=True)

    def finish(self, options: argparse.Namespace) -> None:
        """Write what was measured to the file that --json names."""
        if options.json is not None:
            options.json.write_text(json.dumps(asdict(self), allow_nan=False), encoding="utf-8")


def compare(ours: Sequence[float], theirs: Sequence[float], unit: str, beside_name: str, note: str = "") -> Figure:
    """Return the medians of both, and of the ratios of the rounds: values of one round share its noise."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return Figure(
        statistics.median(ours),
        unit,
        min(ratios),
        max(ratios),
        len(ratios),
        statistics.median(ratios),
        statistics.median(theirs),
        beside_name,
        note,
    )


def alone(
    values: Sequence[float], unit: str, note: str = "", of: Callable[[Iterable[float]], float] | None = None
) -> Figure:
    """Return the median of the rounds, or what `of` makes of them."""
    return Figure((of or statistics.median)(values), unit, min(values), max(values), len(values), note=note)


def in_turn(
    contenders: Mapping[str, Callable[[], float]], rounds: int, budget_s: float = math.inf
) -> dict[str, list[float]]:
    """Return the value of each contender in each round. Every other round goes backwards, so that no position gains.

    No round begins when this number of seconds is over. A contender that raises is left out of the result: it has no value in each
    round. The reason is printed.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    began = time.monotonic()
    for number in range(rounds):
        if number and time.monotonic() > began + budget_s:
            break
        for name in list(names):
            try:
                found[name].append(contenders[name]())
            except (OSError, RuntimeError, AssertionError) as error:
                print(f"{name} failed: {error}", file=sys.stderr)
                names.remove(name)
                del found[name]
        names.reverse()
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that about `percent` of the values do not exceed."""
    return sorted(values)[min(int(len(values) * percent / 100), len(values) - 1)]


def parser(about: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options that each part has. SIGTERM ends the program with its `finally` blocks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="measure little of everything, to check that it runs")
    made.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to this file as well")
    return made


def cells(target: Target, figure: Figure | None) -> list[str]:
    """Return the cells of a row: ours, what it was measured beside, the ratio, the range of the rounds, target, verdict."""
    if figure is None:
        return ["not measured yet", "", "", "", bound(target), ""]
    beside = "" if figure.beside is None else f"{figure.beside_name}: {quantity(figure.beside, figure.unit)}"
    ratio, unit = ("", figure.unit) if figure.ratio is None else (quantity(figure.ratio, RATIO), RATIO)
    rounds = f"{quantity(figure.low, unit)} to {quantity(figure.high, unit)}" if figure.rounds > 1 else ""
    verdict = target.verdict(figure.value, figure.ratio)
    value = quantity(figure.value, figure.unit)
    if verdict == "missed" and bound(target).endswith((f" {value}", f" {ratio}")):
        # A miss must not look like the bound.
        value = quantity(figure.value, figure.unit, digits=5)
        ratio = ratio and quantity(figure.ratio or 0.0, RATIO, digits=5)
    return [value, beside, ratio, rounds, bound(target), verdict]


def bound(target: Target) -> str:
    """Show what a target asks for."""
    if target.at_most is not None:
        return f"≤ {quantity(target.at_most, target.unit)}"
    return "" if target.at_least is None else f"≥ {quantity(target.at_least, target.unit)}"


def quantity(value: float, unit: str, digits: int = 3) -> str:
    """Format a number with its unit; seconds in the unit that fits: 430 µs, 1.23 ms, 2.10 s."""
    if unit == "s" and 0 < abs(value) < 1:
        is_long = abs(value) >= 1e-3
        return f"{number(value * (1e3 if is_long else 1e6), digits)} {'ms' if is_long else 'µs'}"
    return f"{number(value, digits)} {unit}".rstrip()


def number(value: float, digits: int = 3) -> str:
    """Format a number to this number of significant digits; a whole one has no decimals."""
    if value == int(value):
        return f"{int(value):,}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"
