"""The results of the replay of a trace, as tables and plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from benchmarks.replay.openb import MODELS, OWNERS, SCHEDULED, SIZES, TIMES, Trace
from benchmarks.replay.policies import Policy
from benchmarks.replay.runs import EARLY_PART, STARVED_TIMES, arriving
from benchmarks.shared.results import Results, show

Run = dict[str, Any]

OURS, UNRESERVED, EASY = "ours", "no reservations", "EASY, exact limits"
SEVERAL_GPUS = SIZES[2:]
WAITS = ("mean wait, s", "p50, s", "p95, s", "p99, s", "longest, s", f"waited over {STARVED_TIMES} x their run time")
QUOTED = {"random": 0.875, "best fit": 0.931, "FGD": 0.954}
QUOTED_FROM = (
    "Quoted, not measured here, from Weng et al., Beware of Fragmentation, USENIX ATC '23. There, CPUs and memory of the nodes "
    "are limits too, and the sampling differs slightly (it takes the shuffled trace once and draws more tasks on top). So compare "
    "the quoted values only with each other. Quoted from the issue that asked for this benchmark, from a quick model with GPUs "
    "alone: random 94.3 %, best fit 96.0 %, FGD 96.0 %."
)


def trace_in_short(trace: Trace) -> dict[str, int]:
    """Count what is in the trace."""
    return {
        "nodes": len(trace.nodes),
        "gpus": trace.gpus,
        "tasks": len(trace.tasks) + trace.without_gpu + trace.not_askable + trace.without_times,
        "tasks_with_gpu": len(trace.tasks),
        "without_gpu": trace.without_gpu,
        "not_askable": trace.not_askable,
        "without_times": trace.without_times,
        "never_scheduled": sum(not task.was_scheduled for task in trace.tasks),
    }


def tell_trace(results: Results, trace: Trace) -> None:
    found = trace_in_short(trace)
    results.note(
        f"The trace: {found['nodes']:,} nodes, {found['gpus']:,} GPUs, {found['tasks']:,} tasks. {found['tasks_with_gpu']:,} ask "
        f"for GPUs; {found['without_gpu']:,} do not and are left out, as are {found['not_askable']:,} that name models in a way "
        "that the pool cannot ask for. A fraction of a GPU is a share of its memory. The trace names no owners, so its tasks are "
        f"spread over {OWNERS} owners by a hash of their names."
    )
    if trace.without_times:
        results.note(f"{trace.without_times:,} more tasks have no times of their own and are left out.")
    if MODELS in trace.lacks:
        results.note(f"This list of tasks has no column {MODELS}. So no task asks for a model of GPU.")
    if SCHEDULED in trace.lacks:
        results.note(f"This list of tasks has no column {SCHEDULED}. Each task runs from its creation to its deletion.")
    if not trace.has_times:
        missing = " and ".join(sorted(trace.lacks.intersection(TIMES)))
        results.skip("the trace in its own time", f"this list of tasks has no {missing}")
        return
    if found["never_scheduled"]:
        results.note(_never_scheduled(trace))
    arrives_at = [task.created_at for task in trace.tasks]
    since, until = arriving(arrives_at)
    if until > arrives_at[0]:
        early = (since - arrives_at[0]) / (until - arrives_at[0])
        results.note(
            f'Below, "while tasks arrive" is the time from when {EARLY_PART:.0%} of the tasks have arrived until the last one '
            f"has, which is the same for all policies. The time before, {early:.1%} of that of all arrivals, is left out."
        )


def _never_scheduled(trace: Trace) -> str:
    """Say how many of the tasks never ran, and how they are replayed."""
    never = [task for task in trace.tasks if not task.was_scheduled]
    part = sum(task.milli * task.duration_s for task in never) / sum(t.milli * t.duration_s for t in trace.tasks)
    return (
        f"{len(never):,} of these ({len(never) / len(trace.tasks):.1%}) were never scheduled in the trace (they have no "
        "scheduled_time). They count as tasks like all others: they arrive at their creation_time and, once served, run for the "
        "time from there to their deletion_time. That is "
        f"{show(statistics.median(t.duration_s for t in never))} s at the median, and in all {part:.2%} of the GPU time that all "
        "tasks ask for."
    )


def tell_policies(results: Results, policies: Iterable[Policy]) -> None:
    rows = [[policy.name, policy.says] for policy in policies]
    results.table("What is compared", ["policy", "what it does"], rows, is_headline=True)


def tell_sampled(results: Results, runs: Sequence[Run], demand: float) -> None:
    """Show how much of the GPUs can be allocated to the tasks of the default list."""
    groups = by_policy(runs)
    results.table(
        f"Tasks drawn until they ask for {demand:.0%} of all GPUs; none ends, and one that cannot be served at once goes away",
        [
            "placement",
            "allocated, %",
            "least to most",
            "allocated at the first miss, %",
            "unusable of the free, %",
            "decisions/s",
            "quoted, %",
        ],
        [
            [
                name,
                percent(middle(group, "allocated")),
                spread(group, "allocated"),
                percent(middle(group, "allocated_at_first_miss")),
                percent(middle(group, "fragmented_of_free")),
                whole(middle(group, "speed", "per_s")),
                f"{100 * QUOTED[name]:.1f}" if name in QUOTED else None,
            ]
            for name, group in groups
        ],
        note=f"Medians over {len(groups[0][1])} samples. {QUOTED_FROM}",
    )
    results.plot(
        "allocated",
        "Allocated, by demand",
        kind="line",
        x="demand, % of all GPUs",
        y="allocated, %",
        series={
            name: [(100 * asked, 100 * allocated) for asked, allocated, _ in group[0]["series"]["points"]]
            for name, group in groups
        },
        note=f"The sample with seed {groups[0][1][0]['seed']}.",
    )


def tell_timed(results: Results, runs: Sequence[Run]) -> None:
    """Show how long the tasks of the default list wait: a row for each run."""
    found = {run["policy"]: run for run in runs}
    title = title_of(found[OURS])
    is_crowded = any(run["most_waiting"] for run in found.values())
    notes = [cost_of_reservations(found[OURS], found[UNRESERVED])] if is_crowded else ["No task waited."]
    if refused := found[OURS]["refused"]:
        notes.append(f"Refused, because none of these nodes could ever serve the task: {refused:,}.")
    _tell_waits(results, title, found, note=" ".join(notes))
    if is_crowded:
        _tell_sizes(results, f"{title}: by size of the request", found)
        results.plot(
            "waits",
            title,
            kind="ecdf",
            x="waited, s",
            y="share of the tasks",
            log_x=True,
            # A logarithmic scale has no zero.
            series={
                name: [(max(wait_s, 1.0), share) for wait_s, share in run["wait_cdf"]["points"]]
                for name, run in found.items()
            },
            note="A wait of less than a second is shown as a second.",
        )


def title_of(run: Run) -> str:
    """Say what was replayed, and on which nodes."""
    return f"The trace in its own time, on {run['nodes']:,} of its nodes ({run['gpus']:,} GPUs)"


def cost_of_reservations(ours: Run, unreserved: Run) -> str:
    """Say what is worse, better and the same because of reservations. For each of these measures, less is better."""
    measures = [
        ("the number that waited", "", *(run["wait_s"]["waited"] for run in (ours, unreserved))),
        ("the mean wait", " s", *(run["wait_s"]["mean"] for run in (ours, unreserved))),
        ("the longest wait", " s", *(run["wait_s"]["max"] for run in (ours, unreserved))),
    ]
    several = [[run["by_size"][size] for size in SEVERAL_GPUS if size in run["by_size"]] for run in (ours, unreserved)]
    several = [[found for found in sizes if found["served"]] for sizes in several]
    if all(several):
        means = [sum(s["mean"] * s["served"] for s in sizes) / sum(s["served"] for s in sizes) for sizes in several]
        measures += [
            ("the mean wait for several GPUs", " s", *means),
            ("the longest wait for several GPUs", " s", *(max(found["max"] for found in sizes) for sizes in several)),
        ]
    worse: list[str] = []
    better: list[str] = []
    same: list[str] = []
    for what, unit, reserving, without in measures:
        if show(reserving) == show(without):
            same.append(f"{what} ({show(reserving)}{unit})")
        else:
            text = f"{what} ({show(reserving)} instead of {show(without)}{unit})"
            (worse if reserving > without else better).append(text)
    return (
        "The effect of reservations: ours compared with none. "
        f"Worse: {', '.join(worse) or 'nothing'}. Better: {', '.join(better) or 'nothing'}. "
        f"The same: {', '.join(same) or 'nothing'}."
    )


def _tell_waits(results: Results, title: str, runs: dict[str, Run], note: str) -> None:
    results.table(
        title,
        [
            "policy",
            f"waited, of {runs[OURS]['served']:,}",
            *WAITS,
            "allocated while tasks arrive, %",
            "allocated at most, %",
            "allocated while a task waits, %",
            "decisions/s",
        ],
        [
            [
                name,
                run["wait_s"]["waited"],
                run["wait_s"]["mean"],
                *(whole(run["wait_s"][part]) for part in ("p50", "p95", "p99", "max")),
                run["wait_s"]["starved"],
                percent(run["mean_allocated_while_they_arrive"]),
                percent(run["peak_allocated"]),
                percent(run["mean_allocated_while_somebody_waits"]),
                whole(run["speed"]["per_s"]),
            ]
            for name, run in runs.items()
        ],
        note=note,
    )


def _tell_sizes(results: Results, title: str, runs: dict[str, Run]) -> None:
    columns = ("p50", "p95", "p99", "max", "starved", "most_overtaken")
    results.table(
        title,
        [
            "policy and size",
            "served",
            "waited",
            *WAITS,
            "most overtaken",
        ],
        [
            [
                f"{name}: {size}",
                found["served"],
                found.get("waited"),
                found.get("mean"),
                *(whole(found.get(column)) for column in columns),
            ]
            for name, run in runs.items()
            for size, found in run["by_size"].items()
        ],
        note=who_starves(runs),
    )


def who_starves(runs: dict[str, Run]) -> str:
    """Say for each policy which size has the largest share of tasks that waited far longer than they ran."""
    texts: list[str] = []
    for name, run in runs.items():
        sizes = {size: found for size, found in run["by_size"].items() if found.get("starved")}
        if sizes:
            worst = max(sizes, key=lambda size: sizes[size]["starved"] / sizes[size]["served"])
            texts.append(f"{name}: {worst}, {sizes[worst]['starved']:,} of {sizes[worst]['served']:,}")
        else:
            texts.append(f"{name}: none")
    return (
        f"Starvation: the size with the largest share of tasks that waited over {STARVED_TIMES} x their run time. "
        f"{'; '.join(texts)}."
    )


def middle(runs: Sequence[Run], *path: str) -> float | None:
    """Return the median over the seeds of the value at this path; None if no run has it."""
    found: list[float] = []
    for run in runs:
        value: Any = run
        for part in path:
            value = value.get(part) if value is not None else None
        if value is not None:
            found.append(value)
    return statistics.median(found) if found else None


def by_policy(runs: Iterable[Run]) -> list[tuple[str, list[Run]]]:
    """Group consecutive runs by policy, in their order."""
    return [(name, list(group)) for name, group in groupby(runs, key=lambda run: str(run["policy"]))]


def percent(part: float | None) -> str | None:
    return None if part is None else f"{100 * part:.2f}"


def whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def spread(runs: Sequence[Run], key: str) -> str:
    values = [run[key] for run in runs]
    return f"{100 * min(values):.2f} to {100 * max(values):.2f}"
