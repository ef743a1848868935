"""What time limits do, as tables: how long tasks wait, and how true the dates are that waiters are told."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from benchmarks.replay import synthetic
from benchmarks.replay.limits import ALL_EXACT, NOBODY
from benchmarks.replay.openb import SIZES
from benchmarks.replay.runs import quantile
from benchmarks.replay.tables import EASY, OURS, UNRESERVED, Run, percent, title_of, whole
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
    "Only our rule depends on what is declared; EASY knows each run time. Backfilled: leases of our rule on reserved GPUs, whose "
    "limit ends before the date."
)
# DESIGN.md of the project, section 6: mean waits on the trace with few nodes, and of 8 GPUs with the synthetic load.
TARGETS_S = (1_100.0, 137_000.0, 3_500.0)


def tell_limits(results: Results, runs: Sequence[Run]) -> None:
    """Compare time limits and queues on the default list."""
    found = _by_label([run for run in runs if run["policy"] == OURS or run["rule"] != "OURS"])
    _tell_waits(results, f"{title_of(runs[0])}: time limits", found, ONLY_OURS)
    _tell_told(results, f"{title_of(runs[0])}: told and true starts", found)
    _tell_figures(results, found)


def tell_other_lists(results: Results, runs: Sequence[Run]) -> None:
    """Compare queues on the other lists of tasks."""
    found: dict[str, list[Run]] = {}
    notes: list[str] = []
    for tasks, group in groupby(runs, key=lambda run: str(run["list"])):
        same = list(group)
        found |= {f"{tasks}: {label}": of_label for label, of_label in _by_label(same).items()}
        notes.append(
            f"{tasks}: {same[0]['nodes']:,} nodes, {same[0]['gpus']:,} GPUs, {same[0]['refused']:,} tasks refused."
        )
    if found:
        note = (
            "Each list is replayed on so many nodes that its tasks ask for as much of them as those of the default list above. "
            f"{' '.join(notes)} A task is refused if none of these nodes could ever serve it. {ONLY_OURS}"
        )
        _tell_waits(results, "The other lists in their own time", found, note)


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
        f"loads of {statistics.fmean(run['tasks'] for run in some):,.0f} requests in {synthetic.LASTS_S / 3600:g} hours, drawn "
        f"with the seeds 1 to {len(some)}. The target was set with another load: there the earlier rule lets all requests wait about as long as "
        f"here, and the wide ones less long. {ONLY_OURS}"
    )
    _tell_waits(results, title, found, note)
    _tell_told(results, f"{title}: told and true starts", found)
    wide = [run["by_size"][WIDE]["mean"] for run in found[f"{OURS}, {ALL_EXACT.name}"]]
    easy, unreserved = (whole(_mean(found[name], "by_size", WIDE, "mean")) for name in (EASY, UNRESERVED))
    results.figure(
        "replay_synthetic_wide",
        f"the synthetic load: mean wait for {synthetic.WIDE} GPUs when all declare their time exactly",
        value=round(statistics.fmean(wide)),
        unit="s",
        target=f"<= {TARGETS_S[2]:,.0f} s",
        is_met=statistics.fmean(wide) <= TARGETS_S[2],
        spread=f"{len(wide)} loads: {min(wide):,.0f} to {max(wide):,.0f}",
        why=f"EASY backfilling, which knows each run time and reserves at once, lets them wait {show(easy)} s with the same "
        f"loads, and a queue without reservations {show(unreserved)} s",
    )


def _by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        label = run["policy"] if run["policy"] != OURS else f"{OURS}, {run['declared']}"
        found.setdefault(label, []).append(run)
    return found


def _tell_waits(results: Results, title: str, found: dict[str, list[Run]], note: str) -> None:
    results.table(
        title,
        ["policy", *COLUMNS],
        [
            [
                label,
                whole(_mean(runs, "wait_s", "mean")),
                whole(_mean(runs, "wait_s", "p95")),
                whole(_mean(runs, "by_size", WIDE, "mean")),
                whole(_mean(runs, "by_size", WIDE, "p95")),
                percent(_mean(runs, "mean_allocated_while_they_arrive")),
                whole(_mean(runs, "backfilled")),
                whole(_mean(runs, "speed", "per_s")),
            ]
            for label, runs in found.items()
        ],
        note=note,
        is_headline=True,
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
    for figure_id, what, path, target_s in (
        ("replay_wait", "all requests", ("wait_s", "mean"), TARGETS_S[0]),
        ("replay_wait_wide", f"requests for {WIDE}", ("by_size", WIDE, "mean"), TARGETS_S[1]),
    ):
        values = {label: whole(_at(runs[0], path)) for label, runs in found.items()}
        value = values.pop(f"{OURS}, {NOBODY.name}")
        others = "; ".join(f"{label.removeprefix(f'{OURS}, ')}: {show(one)} s" for label, one in values.items())
        (some, *_), *_ = found.values()
        results.figure(
            figure_id,
            f"the trace on {some['gpus']} GPUs, one choice of nodes: mean wait of {what} when nobody declares a time limit"
            f"{beside_unreserved(value, values.get(UNRESERVED))}",
            value=value,
            unit="s",
            target=f"<= {target_s:,.0f} s",
            is_met=None if value is None else value <= target_s,
            spread=others,
            why="none was served" if value is None else "see the other rules with the same tasks",
        )


def beside_unreserved(value: int | None, unreserved: int | None) -> str:
    """Compare the wait with that without reservations: where both are the same, no reservation has changed anything."""
    if unreserved is None:
        return ""
    return "; as without reservations" if value == unreserved else f"; without reservations: {show(unreserved)} s"


def _mean(runs: Sequence[Run], *path: str) -> float | None:
    """Return the mean of the values at this path; None if a run has none."""
    values = [_at(run, path) for run in runs]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _at(run: Run, path: Sequence[str]) -> float | None:
    value: Any = run
    for part in path:
        value = value.get(part, {}) if isinstance(value, dict) else value
    return float(value) if isinstance(value, int | float) else None
