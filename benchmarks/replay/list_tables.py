"""What becomes of each list of tasks, as tables: what can be allocated, and how long tasks wait."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.replay.lists import DEFAULT, LISTS
from benchmarks.replay.openb import GPU_MILLI, Trace
from benchmarks.replay.tables import OURS, Run, by_policy, middle, percent
from benchmarks.shared.results import Cell, Results

# How far below the best other placement of the same run ours may be and still count as level with it.
AS_GOOD_POINTS = -0.05
DERIVED = "derived here from the default list, not the published file"
PUBLISHED = "the published file"


def tell_lists(results: Results, traces: Mapping[str, Trace], published: Sequence[str]) -> None:
    """Show what the lists ask for, and where each is from."""
    says = {DEFAULT: "the trace as it was recorded", **{one.name: one.says for one in LISTS}}
    results.table(
        "The lists of tasks",
        [
            "list",
            "what it is",
            "from",
            "tasks",
            "asked for by shares of a GPU, %",
            "asked for by tasks for several GPUs, %",
            "tasks that name a model, %",
        ],
        [[name, says[name], PUBLISHED if name in published else DERIVED, *_asked_for(traces[name])] for name in traces],
        note=""
        if len(published) == len(traces)
        else f"{DERIVED.capitalize()}: benchmarks/replay/lists.py has the rules.",
        is_headline=True,
    )
    for name, trace in traces.items():
        if not trace.has_times and name != DEFAULT:
            results.skip(f"the list {name} in its own time", "this list has no times")


def _asked_for(trace: Trace) -> list[Cell]:
    asked_milli = sum(task.milli for task in trace.tasks)
    shares_milli = sum(task.milli for task in trace.tasks if task.gpu_milli < GPU_MILLI)
    several_milli = sum(task.milli for task in trace.tasks if task.gpus > 1)
    named = sum(task.wishes.model is not None for task in trace.tasks)
    parts = (shares_milli / asked_milli, several_milli / asked_milli, named / len(trace.tasks))
    return [len(trace.tasks), *(f"{100 * part:.1f}" for part in parts)]


class Lead(NamedTuple):
    """By how many percentage points ours is ahead of the best other placement: in the median, and on each sample of tasks."""

    median: float
    tasks: str
    best_other: str
    of_samples: list[float]


def tell_allocated(results: Results, runs: Sequence[Run], demand: float) -> None:
    """Compare ours with the best other placement on each list, always on the same sample of tasks."""
    lists = list(dict.fromkeys(run["list"] for run in runs))
    groups = {tasks: dict(by_policy([run for run in runs if run["list"] == tasks])) for tasks in lists}
    leads = [lead_of(tasks, groups[tasks]) for tasks in lists]
    worst = min(leads)
    results.table(
        f"Allocated at {demand:.0%} demand, for each list of tasks, %",
        ["list", *groups[lists[0]], "ours minus the best other, points", "the best other"],
        [
            [
                lead.tasks,
                *(percent(middle(group, "allocated")) for group in groups[lead.tasks].values()),
                f"{lead.median:+.2f}",
                lead.best_other,
            ]
            for lead in leads
        ],
        note="Medians over the samples. The difference is that on the same sample of tasks.",
        is_headline=True,
    )
    results.figure(
        "replay_allocated",
        f"GPU capacity allocated at {demand:.0%} demand: our placement minus the best other one, on the same sample of tasks, "
        f"for the list of tasks where that is least, median of {len(worst.of_samples)} samples",
        value=worst.median,
        unit="percentage points",
        target=f">= {AS_GOOD_POINTS:.2f} percentage points: within {-AS_GOOD_POINTS:.2f} points of the best of the run",
        is_met=worst.median >= AS_GOOD_POINTS,
        spread="; ".join(
            f"{lead.tasks} {lead.median:+.2f} ({min(lead.of_samples):+.2f} to {max(lead.of_samples):+.2f})"
            for lead in leads
        ),
        why=f"with the list {worst.tasks} the best other one was {worst.best_other}",
    )


def lead_of(tasks: str, groups: Mapping[str, Sequence[Run]]) -> Lead:
    """Compare ours with the best of the others on each sample of a list."""
    others = [run for name, group in groups.items() if name != OURS for run in group]
    best = [
        max((o for o in others if o["seed"] == ours["seed"]), key=lambda o: o["allocated"]) for ours in groups[OURS]
    ]
    points = [100 * (ours["allocated"] - run["allocated"]) for ours, run in zip(groups[OURS], best, strict=True)]
    names = " or ".join(sorted({run["policy"] for run in best}))
    return Lead(round(statistics.median(points), 2), tasks, names, points)
