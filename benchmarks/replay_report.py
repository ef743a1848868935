"""What the replay of a trace found, as tables and plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from openb import Trace
from replay_policies import Policy
from results import Results

Run = dict[str, Any]

OURS = "ours"
QUOTED_FROM = (
    "Quoted from Weng et al., Beware of Fragmentation, USENIX ATC '23: there, CPUs and memory of the nodes limit too, so that "
    "these are not to be compared with the rest, but among each other."
)
QUOTED = {"random": 0.875, "best fit": 0.931, "FGD": 0.954}
# What a quick model of best fit and of FGD reached with GPUs alone, before this was built.
BEST_KNOWN = 0.960


def trace_in_short(trace: Trace) -> dict[str, int]:
    """How much there is of everything."""
    return {
        "nodes": len(trace.nodes),
        "gpus": trace.gpus,
        "tasks": len(trace.tasks) + trace.without_gpu + trace.not_askable,
        "tasks_with_gpu": len(trace.tasks),
        "without_gpu": trace.without_gpu,
        "not_askable": trace.not_askable,
    }


def tell_trace(results: Results, trace: Trace) -> None:
    found = trace_in_short(trace)
    results.note(
        f"The trace: {found['nodes']:,} nodes, {found['gpus']:,} GPUs, {found['tasks']:,} tasks. {found['tasks_with_gpu']:,} ask "
        f"for GPUs; {found['without_gpu']:,} do not and are left out, as are {found['not_askable']:,} that name models in a way "
        "the pool cannot ask for. A fraction of a GPU is a share of its memory."
    )


def tell_policies(results: Results, policies: Iterable[Policy]) -> None:
    results.table("What is compared", ["policy", "what it does"], [[policy.name, policy.says] for policy in policies])


def tell_sampled(results: Results, runs: Sequence[Run], demand: float) -> None:
    """How much can be allocated."""
    skipped = by_policy([run for run in runs if run["unserved"] == "skipped"])
    results.table(
        f"Tasks drawn until they ask for {demand:.0%} of all GPUs; nobody leaves, who cannot be served at once goes away",
        [
            "placement",
            "allocated, %",
            "least to most",
            "at the first miss, %",
            "of the free, of no use, %",
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
                percent(QUOTED.get(name)),
            ]
            for name, group in skipped
        ],
        note=f"Medians over {len(skipped[0][1])} samples. {QUOTED_FROM}",
    )
    ours = middle(dict(skipped)[OURS], "allocated")
    best = max(middle(group, "allocated") or 0.0 for _, group in skipped)
    results.figure(
        "replay_allocated",
        f"GPU capacity allocated at {demand:.0%} demand, our placement",
        value=percent(ours),
        unit="%",
        target=f">= {BEST_KNOWN:.1%}, the best that is known",
        is_met=None if ours is None else round(ours, 3) >= BEST_KNOWN,
        spread=spread(dict(skipped)[OURS], "allocated"),
        why=f"The best of all placements here reached {best:.2%}.",
    )
    results.plot(
        "allocated",
        "Allocated, by what was asked for",
        kind="line",
        x="asked for, % of all GPUs",
        y="allocated, %",
        series={
            name: [(100 * asked, 100 * allocated) for asked, allocated, _ in group[0]["series"]["points"]]
            for name, group in skipped
        },
    )
    queued = by_policy([run for run in runs if run["unserved"] == "queued"])
    results.table(
        "The same, but who cannot be served waits",
        ["queue", "allocated, %", "least to most", "waiting at the end", "decisions/s"],
        [
            [
                name,
                percent(middle(group, "allocated")),
                spread(group, "allocated"),
                whole(middle(group, "waiting")),
                whole(middle(group, "speed", "per_s")),
            ]
            for name, group in queued
        ],
    )


def tell_timed(results: Results, runs: Sequence[Run]) -> None:
    """How long they wait."""

    def scenario(run: Run) -> tuple[float, float]:
        return run["node_fraction"], run["speedup"]

    for number, ((fraction, speedup), group) in enumerate(groupby(runs, key=scenario)):
        found = list(group)
        gpus = " / ".join(str(count) for count in sorted({run["gpus"] for run in found}))
        own_time = "in its own time" if speedup == 1 else f"with arrivals {speedup:g} times as fast"
        title = f"The trace {own_time}, on {fraction:g} of the nodes ({gpus} GPUs)"
        is_crowded = any(run["most_waiting"] for run in found)
        _tell_waits(results, title, by_policy(found), note="" if is_crowded else "Nobody waited.")
        if is_crowded:
            _tell_sizes(results, f"{title}: by what was asked for", by_policy(found))
            results.plot(
                f"waits-{number}",
                title,
                kind="ecdf",
                x="waited, s",
                y="share of the tasks",
                log_x=True,
                # On such a scale there is no zero; who did not wait stands at a second.
                series={
                    name: [(max(wait_s, 1.0), share) for wait_s, share in group[0]["wait_cdf"]["points"]]
                    for name, group in by_policy(found)
                },
                note="Who waited less than a second stands at a second.",
            )


def _tell_waits(results: Results, title: str, groups: Sequence[tuple[str, Sequence[Run]]], note: str) -> None:
    results.table(
        title,
        [
            "policy",
            "waited",
            "of tasks",
            "wait p50, s",
            "p95, s",
            "p99, s",
            "longest, s",
            "never served",
            "allocated, %",
            "while somebody waits, %",
            "decisions/s",
        ],
        [
            [
                name,
                whole(middle(runs, "wait_s", "waited")),
                whole(middle(runs, "tasks")),
                *(whole(middle(runs, "wait_s", part)) for part in ("p50", "p95", "p99", "max")),
                whole(middle(runs, "never_served")),
                percent(middle(runs, "mean_allocated")),
                percent(middle(runs, "mean_allocated_while_somebody_waits")),
                whole(middle(runs, "speed", "per_s")),
            ]
            for name, runs in groups
        ],
        note=note,
    )


def _tell_sizes(results: Results, title: str, groups: Sequence[tuple[str, Sequence[Run]]]) -> None:
    columns = ("served", "waited", "p50", "p95", "p99", "max", "most_overtaken")
    results.table(
        title,
        ["policy and size", "served", "waited", "p50, s", "p95, s", "p99, s", "longest, s", "most overtaken"],
        [
            [f"{name}: {size}", *(whole(middle(runs, "by_size", size, column)) for column in columns)]
            for name, runs in groups
            for size in runs[0]["by_size"]
        ],
    )


def middle(runs: Sequence[Run], *path: str) -> float | None:
    """The median over the seeds of what stands there; None where it stands nowhere."""
    found: list[float] = []
    for run in runs:
        value: Any = run
        for part in path:
            value = value.get(part) if value is not None else None
        if value is not None:
            found.append(value)
    return statistics.median(found) if found else None


def by_policy(runs: Iterable[Run]) -> list[tuple[str, list[Run]]]:
    """In the order in which they came."""
    return [(name, list(group)) for name, group in groupby(runs, key=lambda run: str(run["policy"]))]


def percent(part: float | None) -> float | None:
    return None if part is None else round(100 * part, 2)


def whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def spread(runs: Sequence[Run], key: str) -> str:
    values = [run[key] for run in runs]
    return f"{100 * min(values):.2f} to {100 * max(values):.2f}"
