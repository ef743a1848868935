"""The results of a benchmark, in one shape for all: printed for people as they come, and data for the documents.

A script makes one `Results`, adds to it as it measures, and ends with `finish`:

    options = parser(__doc__).parse_args()          # --quick and --json FILE; a script may add options of its own
    results = Results("leases", "What it is about, in one sentence.")
    results.note("Peers: redis 7.0.15")
    results.skip("Ray", "pip found no wheel of it")
    results.table("Request + release", ["", "median", "spread"], [["ours", 0.91, "0.88 to 1.02"]])
    results.plot("hand-over", "From a release to the next holder", kind="ecdf", x="ms", y="share", series={"ours": ecdf(times)})
    results.figure("lease_vs_redis", "lease + release", value=3.1, unit="x", target="<= 2.5", is_met=False, why="...")
    results.finish(options)

A table or plot with `is_headline=True` is one that people ask for first. docs/BENCHMARKS.md has those, and
docs/BENCHMARK_DETAILS.md has all others.

No text may hold a number that was not measured in this run, except for parameters (64 clients).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Cell: TypeAlias = str | float | None
Point: TypeAlias = tuple[float | str, float]
Kind: TypeAlias = Literal["line", "bar", "ecdf"]
NOT_KNOWN = "-"
ECDF_POINTS = 100


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first column names the row. A unit belongs into the heading or into the cell's text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    is_headline: bool = False


@dataclass(frozen=True)
class Series:
    """The points of one line, by their coordinates; a bar's x is its label."""

    x: list[float | str]
    y: list[float]


@dataclass(frozen=True)
class Plot:
    """A plot. Its `id` and the benchmark's name make the name of its file."""

    id: str
    title: str
    kind: Kind
    x: str
    y: str
    series: Mapping[str, Series]
    log_x: bool = False
    log_y: bool = False
    note: str = ""
    is_headline: bool = False


@dataclass(frozen=True)
class Figure:
    """A number that has a target. A value that could not be measured is None, and `why` says the reason.

    `shown` is the text of the value. Without it, three digits and the unit are shown.
    """

    id: str
    what: str
    value: float | None
    unit: str
    target: str
    is_met: bool | None
    spread: str = ""
    why: str = ""
    shown: str = ""


@dataclass(frozen=True)
class Skipped:
    what: str
    reason: str


@dataclass
class Results:
    """What one benchmark measured, in the order in which it was measured."""

    name: str
    about: str
    is_quick: bool = False
    notes: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def __post_init__(self) -> None:
        _say(self.about)

    def note(self, text: str) -> None:
        """Add a sentence about this run, such as versions or how something was measured."""
        self.notes.append(text)
        _say(text)

    def skip(self, what: str, reason: str) -> None:
        """Note a contender, or a part of the benchmark, that should have been measured and was not."""
        self.skipped.append(Skipped(what, reason))
        _say(f"{what} is not measured: {reason}")

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        note: str = "",
        *,
        is_headline: bool = False,
    ) -> None:
        """Add and print a table. Every row has as many cells as there are columns; an unknown cell is None."""
        assert all(len(row) == len(columns) for row in rows), (title, columns, rows)
        self.tables.append(Table(title, columns, rows, note, is_headline))
        texts = [list(columns), *([show(cell) for cell in row] for row in rows)]
        widths = [max(len(row[column]) for row in texts) for column in range(len(columns))]
        lines = ("  ".join([row[0].ljust(widths[0]), *(map(str.rjust, row[1:], widths[1:]))]).rstrip() for row in texts)
        _say("\n".join((title, *(f"  {line}" for line in lines), *([f"  {note}"] if note else []))))

    def plot(
        self,
        plot_id: str,
        title: str,
        *,
        kind: Kind,
        x: str,
        y: str,
        series: Mapping[str, Iterable[Point]],
        log_x: bool = False,
        log_y: bool = False,
        note: str = "",
        is_headline: bool = False,
    ) -> None:
        """Add a plot for the document. It is not printed."""
        lines: dict[str, Series] = {}
        for name, points in series.items():
            pairs = list(points)
            lines[name] = Series([first for first, _ in pairs], [second for _, second in pairs])
        self.plots.append(Plot(plot_id, title, kind, x, y, lines, log_x, log_y, note, is_headline))

    def figure(
        self,
        figure_id: str,
        what: str,
        *,
        value: float | None,
        unit: str,
        target: str,
        is_met: bool | None,
        spread: str = "",
        why: str = "",
        shown: str = "",
    ) -> None:
        """Add a number with a target. `why` is the known reason for a miss, and is kept only if the target is missed."""
        why = "" if is_met else why
        self.figures.append(Figure(figure_id, what, value, unit, target, is_met, spread, why, shown))

    def finish(self, options: argparse.Namespace) -> None:
        """Print the figures, and write all results to the file that --json names."""
        self.is_quick = options.quick
        if self.figures:
            verdicts = {True: "reached", False: "MISSED", None: "not measured"}
            lines = (
                f"  {verdicts[figure.is_met]:<12}  {figure.what}: {shown(asdict(figure))}"
                f"{f' ({figure.spread})' if figure.spread else ''}, target: {figure.target}"
                f"{f'; {figure.why}' if figure.why else ''}"
                for figure in self.figures
            )
            _say("\n".join(("Figures", *lines)))
        if options.json is not None:
            options.json.write_text(to_json(asdict(self)), encoding="utf-8")


def parser(about: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="measure little of everything, to check that it runs")
    made.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to this file as well")
    return made


def to_json(data: Any) -> str:
    """Return JSON with one row, series or figure a line, so that two runs can be compared. NaN is refused."""
    return "\n".join(_lines(data)) + "\n"


def show(cell: Cell, digits: int = 3) -> str:
    """Format a number to three significant digits, or to so many, and leave a text as it is. All numbers in tables go through this."""
    if cell is None:
        return NOT_KNOWN
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or cell == int(cell):
        return f"{int(cell):,}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(cell))))
    return f"{cell:,.{decimals}f}"


def quantity(value: float | None, unit: str) -> str:
    """Format a number with its unit."""
    return f"{show(value)} {unit}".rstrip() if value is not None else NOT_KNOWN


def shown(figure: Mapping[str, Any]) -> str:
    """Format the value of a figure. Those of an older run have no text of their own."""
    return figure.get("shown") or quantity(figure["value"], figure["unit"])


def duration(seconds: float) -> str:
    """Format seconds in the unit that fits: 430 µs, 1.23 ms, 2.10 s."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return f"{show(seconds * factor)} {unit}"
    return f"{show(seconds * 1e6)} µs"


def ecdf(values: Iterable[float]) -> list[Point]:
    """Return up to `ECDF_POINTS` values, each with the share of all values up to it; the greatest is always included."""
    ordered = sorted(values)
    number = min(ECDF_POINTS, len(ordered))
    ranks = [round((step + 1) * len(ordered) / number) for step in range(number)]
    return [(ordered[rank - 1], rank / len(ordered)) for rank in ranks]


def _lines(data: Any) -> Iterator[str]:
    """Yield the lines: a list or dict of plain values only is one line, any other has one line for each item."""
    items: list[tuple[str, Any]] = []
    if isinstance(data, dict):
        items = [(f"{json.dumps(key, ensure_ascii=False)}: ", value) for key, value in data.items()]
    elif isinstance(data, list | tuple):
        items = [("", value) for value in data]
    if not any(isinstance(value, dict | list | tuple) for _, value in items):
        yield json.dumps(data, ensure_ascii=False, allow_nan=False)
        return
    yield "{" if isinstance(data, dict) else "["
    for number, (name, value) in enumerate(items, 1):
        lines = list(_lines(value))
        lines[0] = name + lines[0]
        lines[-1] += "," if number < len(items) else ""
        yield from (f" {line}" for line in lines)
    yield "}" if isinstance(data, dict) else "]"


def _say(text: str) -> None:
    print(f"{text}\n", flush=True)
