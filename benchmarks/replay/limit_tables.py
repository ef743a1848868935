"""What time limits do, as tables: how long tasks wait, and how true the dates are that waiters are told."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from benchmarks.replay import synthetic
from benchmarks.replay.limits import NOBODY, VARIANTS
from benchmarks.replay.openb import SIZES
from benchmarks.replay.runs import quantile
from benchmarks.replay.tables import OURS, Run, percent, title_of, whole
from benchmarks.shared.results import Results, show

WIDE = SIZES[-1]
COLUMNS = (
    "mean wait, s",
    "p95, s",
    f"{WIDE}: mean wait, s",
    "p95, s",
    "allocated while tasks arrive, %",
    "backfilled",
    "decisions/s",
)
ONLY_OURS = (
    "Only our rule depends on time limits. Backfilled: leases on reserved GPUs, whose limit ends before the date."
)
# DESIGN.md of the project, section 6: mean waits on the trace with few nodes, and of 8 GPUs with the synthetic load.
TARGETS_S = (1_100.0, 137_000.0, 3_500.0)
ALL_EXACT = VARIANTS[3]
WHY_WIDE_WAIT = (
    "only one request has a reservation at a time, and until a whole node is free takes nearly as long as it takes until the "
    "next such request comes"
)


def tell_limits(results: Results, runs: Sequence[Run]) -> None:
    """Compare time limits on the choices of nodes for which there are runs with limits."""
    for _, group in groupby(runs, key=lambda run: (run["node_fraction"], run["speedup"], run["seed"])):
        same = [run for run in group if run["policy"] == OURS or run["rule"] != "OURS"]
        if any(run["declared"] != NOBODY.name for run in same):
            found = _by_label(same)
            title = f"{title_of(same[0])}: time limits"
            _tell_waits(results, title, found, ONLY_OURS)
            _tell_told(results, f"{title_of(same[0])}: told and true starts", found)
            _tell_figures(results, found)


def tell_synthetic(results: Results, runs: Sequence[Run]) -> None:
    found = _by_label(runs)
    gpus = synthetic.NODES * synthetic.GPUS_PER_NODE
    title = f"A synthetic load of {synthetic.LOAD:.0%} on {gpus} GPUs, and every {synthetic.WIDE_EVERY_S / 60:g} minutes a request for {synthetic.WIDE}"
    widths = ", ".join(
        f"{share:.0%} ask for {width}" for width, share in zip(synthetic.WIDTHS, synthetic.SHARES, strict=True)
    )
    some = next(iter(found.values()))
    note = (
        f"{synthetic.NODES} nodes of {synthetic.GPUS_PER_NODE} GPUs. Of the other requests, {widths}. All run for a log-normal "
        f"time, with a median of {show(synthetic.MEDIAN_S / 60)} minutes and sigma {synthetic.SIGMA:g}. Means over {len(some)} "
        f"loads of {statistics.fmean(run['tasks'] for run in some):,.0f} requests in {synthetic.LASTS_S / 3600:g} hours. {ONLY_OURS}"
    )
    _tell_waits(results, title, found, note)
    _tell_told(results, f"{title}: told and true starts", found)
    wide = [run["by_size"][WIDE]["mean"] for run in found[f"{OURS}, {ALL_EXACT.name}"]]
    results.figure(
        "replay_synthetic_wide",
        f"the synthetic load: mean wait for {synthetic.WIDE} GPUs when all declare their time exactly",
        value=round(statistics.fmean(wide)),
        unit="s",
        target=f"<= {TARGETS_S[2]:,.0f} s",
        is_met=statistics.fmean(wide) <= TARGETS_S[2],
        spread=f"{len(wide)} loads: {min(wide):,.0f} to {max(wide):,.0f}",
        why=WHY_WIDE_WAIT,
    )


def _by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        label = run["policy"] if run["policy"] != OURS else f"{OURS}, {run['declared']}"
        found.setdefault(label, []).append(run)
    return found


def _tell_waits(results: Results, title: str, found: dict[str, list[Run]], note: str) -> None:
    def mean(runs: list[Run], *path: str) -> float:
        return statistics.fmean(_at(run, path) for run in runs)

    results.table(
        title,
        ["policy", *COLUMNS],
        [
            [
                label,
                whole(mean(runs, "wait_s", "mean")),
                whole(mean(runs, "wait_s", "p95")),
                whole(mean(runs, "by_size", WIDE, "mean")),
                whole(mean(runs, "by_size", WIDE, "p95")),
                percent(mean(runs, "mean_allocated_while_they_arrive")),
                whole(mean(runs, "backfilled")),
                whole(mean(runs, "speed", "per_s")),
            ]
            for label, runs in found.items()
        ],
        note=note,
    )


def _tell_told(results: Results, title: str, found: dict[str, list[Run]]) -> None:
    """Show how the first date that each waiter was told compares with its start."""
    rows = []
    for label, runs in found.items():
        told = [run["told"] for run in runs if run["told"]]
        waited = sum(one["waited"] for one in told)
        for basis in ("declared", "predicted"):
            later_s = sorted(value for one in told for value in one["told_later_s"].get(basis, ()))
            if later_s:
                early = sum(value < -1.0 for value in later_s) / len(later_s)
                exact = sum(abs(value) <= 60.0 for value in later_s) / len(later_s)
                parts = [whole(quantile(later_s, part)) for part in (0.05, 0.25, 0.5, 0.75, 0.95)]
                rows.append(
                    [f"{label}: {basis}", percent(len(later_s) / waited), *parts, percent(exact), percent(early)]
                )
    results.table(
        title,
        [
            "what, and what the date rests on",
            "told, % of all that waited",
            *(f"told minus true, p{part}, s" for part in (5, 25, 50, 75, 95)),
            "within a minute, %",
            "started later than told, %",
        ],
        rows,
        note="The first date that a waiter was told, minus the time at which it started. Less than 0: it started later.",
    )


def _tell_figures(results: Results, found: dict[str, list[Run]]) -> None:
    ours = {label: runs[0] for label, runs in found.items() if label.startswith(f"{OURS}, ")}
    for figure_id, what, path, target_s in (
        ("replay_wait", "all requests", ("wait_s", "mean"), TARGETS_S[0]),
        ("replay_wait_wide", f"requests for {WIDE}", ("by_size", WIDE, "mean"), TARGETS_S[1]),
    ):
        values = {label: _at(run, path) for label, run in ours.items()}
        value = values[f"{OURS}, {NOBODY.name}"]
        others = "; ".join(
            f"{label.removeprefix(f'{OURS}, ')}: {show(round(one))} s"
            for label, one in values.items()
            if not label.endswith(NOBODY.name)
        )
        some = next(iter(ours.values()))
        results.figure(
            figure_id,
            f"the trace on {some['gpus']} GPUs: mean wait of {what} when nobody declares a time limit",
            value=round(value),
            unit="s",
            target=f"<= {target_s:,.0f} s",
            is_met=value <= target_s,
            spread=others,
            why="see the table: the other rules with the same tasks",
        )


def _at(run: Run, path: Sequence[str]) -> float:
    value: Any = run
    for part in path:
        value = value.get(part, {}) if isinstance(value, dict) else value
    return float(value) if isinstance(value, int | float) else 0.0
