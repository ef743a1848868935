"""Draw the plots of a run: `python -m benchmarks.report.plots measured.json FOLDER`, with a Python that has matplotlib (.bench-venv).

The same data make the same files, byte for byte. The background is transparent and all colours have a middle
brightness, so that a plot is readable on a light page and on a dark one.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.report.document import image_of

INK = "#7a828e"
COLOURS = ("#3b82c4", "#d9822b", "#3a9d5d", "#c94f4f", "#8e6bbf", "#9a7355", "#c766a5", "#7a9a2e", "#2aa3a3", "#888888")
# The legend stands below the plot if a name is longer than this.
MOST_LETTERS = 35
STYLE = {
    "svg.hashsalt": "gpu-worker-pool",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def draw(pyplot: Any, plot: dict[str, Any], path: Path) -> None:
    """Draw one plot into one file."""
    is_wordy = any(len(name) > MOST_LETTERS for name in plot["series"])
    drawing, axes = pyplot.subplots(figsize=(9, 5.5 if is_wordy else 4.2), layout="constrained")
    {"bar": bars, "line": lines, "ecdf": steps}[plot["kind"]](axes, plot["series"])
    if plot["log_x"]:
        axes.set_xscale("log")
    if plot["log_y"]:
        axes.set_yscale("log")
    axes.set(xlabel=plot["x"], ylabel=plot["y"])
    axes.set_title(plot["title"], loc="left")
    axes.grid(visible=True, axis="y" if plot["kind"] == "bar" else "both")
    axes.set_axisbelow(True)
    if len(plot["series"]) > 1:
        if is_wordy:
            drawing.legend(loc="outside lower left", ncols=2)
        else:
            drawing.legend(loc="outside right upper")
    drawing.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(drawing)


def bars(axes: Any, series: dict[str, Any]) -> None:
    """Draw the bars of a label side by side."""
    labels = list(dict.fromkeys(label for points in series.values() for label in points["x"]))
    width = 0.8 / len(series)
    for number, (name, points) in enumerate(series.items()):
        places = [labels.index(label) - 0.4 + width * (number + 0.5) for label in points["x"]]
        axes.bar(places, points["y"], width, label=name, color=colour(number))
    axes.set_xticks(range(len(labels)), labels)


def lines(axes: Any, series: dict[str, Any]) -> None:
    for number, (name, points) in enumerate(series.items()):
        axes.plot(
            points["x"], points["y"], marker="o", markersize=4, label=name, color=colour(number), linestyle=line(number)
        )


def steps(axes: Any, series: dict[str, Any]) -> None:
    for number, (name, points) in enumerate(series.items()):
        axes.step(points["x"], points["y"], where="post", label=name, color=colour(number), linestyle=line(number))
    axes.set_ylim(0, 1.02)


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def line(number: int) -> str:
    """Return the line style, which changes each time the colours start again."""
    return ("-", "--", ":")[number // len(COLOURS) % 3]


def main() -> None:
    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.rcParams["axes.prop_cycle"] = importlib.import_module("cycler").cycler(color=COLOURS)
    folder.mkdir(parents=True, exist_ok=True)
    for one in json.loads(data.read_text(encoding="utf-8"))["benchmarks"]:
        for plot in one["results"]["plots"] if one["results"] else ():
            draw(pyplot, plot, folder / image_of(one["results"]["name"], plot["id"]))


if __name__ == "__main__":
    main()
