"""Replays a trace of a real GPU cluster through the core, in simulated time, for our rules and for others beside them.

    python benchmarks/replay.py --nodes openb_node_list_gpu_node.csv --pods openb_pod_list_default.csv

The trace is Alibaba's OpenB 2023 (see openb.py for the format and for what is made of it). Two experiments:

- sampled: tasks are drawn until they ask for 130 % of all GPUs and come one by one; none goes. How much of the GPUs could be
  allocated? Who cannot be served at once goes away again. Then the same with a queue: who cannot be served waits.
- timed: the trace in its own time, with departures, on a fraction of its nodes; and with arrivals so many times as fast.

Prints tables in Markdown; `--json` writes all of it with points to plot. Every figure is measured in this run, except those
that are marked as quoted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from openb import Trace, cut, read_trace, sample_nodes
from replay_policies import POLICIES
from replay_runs import run_sampled, run_timed

SCHEMA = "gpu-pool/replay/1"
DEMAND = 1.3
# Fraction of the nodes, how many times as fast they come, choices of the nodes.
SCENARIOS = ((1.0, 1.0, 1), (0.5, 1.0, 1), (0.25, 1.0, 1), (0.01, 1.0, 3), (0.25, 1000.0, 1))
NEEDS_FORESIGHT = "FGD"
QUOTED = {
    "what": "share of GPU capacity allocated at 130 % demand, where CPUs and memory of the nodes limit too",
    "source": "Weng et al., Beware of Fragmentation, USENIX ATC '23",
    "allocated": {"random": 0.875, "best fit": 0.931, "FGD": 0.954},
}
QUICK_NODES, QUICK_TASKS = 40, 300

Run = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run, as it is handed to another process."""

    experiment: str
    policy: int
    seed: int
    is_queued: bool = False
    fraction: float = 1.0
    speedup: float = 1.0

    def __str__(self) -> str:
        what = ("queued" if self.is_queued else "skipped") if self.experiment == "sampled" else self.scenario
        return f"{self.experiment}, {what}, {POLICIES[self.policy].name}, seed {self.seed}"

    @property
    def scenario(self) -> str:
        return f"{self.fraction:g} of the nodes, arrivals at {self.speedup:g}x"


@dataclass(frozen=True)
class Source:
    """Where the trace is, and whether only a sample of it is wanted."""

    nodes: Path
    pods: Path
    is_quick: bool


@lru_cache(maxsize=1)
def load(source: Source) -> Trace:
    """The trace; once in each process."""
    trace = read_trace(source.nodes, source.pods)
    return cut(trace, QUICK_NODES, QUICK_TASKS, seed=1) if source.is_quick else trace


def carry_out(source: Source, job: Job) -> Run:
    trace, policy = load(source), POLICIES[job.policy]
    if job.experiment == "sampled":
        return run_sampled(trace, policy, DEMAND, job.seed, is_queued=job.is_queued)
    smaller = sample_nodes(trace, job.fraction, job.seed)
    return run_timed(smaller, policy, job.fraction, job.speedup, job.seed)


def jobs_of(seeds: int, queued_seeds: int, scenarios: Iterable[tuple[float, float, int]]) -> Iterator[Job]:
    for number, policy in enumerate(POLICIES):
        if policy.is_placement:
            yield from (Job("sampled", number, seed) for seed in range(1, seeds + 1))
        if policy.name == "ours" or not policy.is_placement:
            yield from (Job("sampled", number, seed, is_queued=True) for seed in range(1, queued_seeds + 1))
    for fraction, speedup, choices in scenarios:
        for number, policy in enumerate(POLICIES):
            if policy.name != NEEDS_FORESIGHT:
                for seed in range(1, choices + 1):
                    yield Job("timed", number, seed, fraction=fraction, speedup=speedup)


def run_all(source: Source, jobs: Sequence[Job], processes: int) -> list[Run]:
    """What the jobs found, in their order."""
    if processes == 1:
        return [_told(job, carry_out(source, job)) for job in jobs]
    # The long ones first, so that no process is left with one at the end.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = {job: pool.submit(carry_out, source, job) for job in sorted(jobs, key=lambda job: -job.speedup)}
        return [_told(job, futures[job].result()) for job in jobs]


def _told(job: Job, run: Run) -> Run:
    print(f"done: {job}", file=sys.stderr)
    return run


# --- tables --------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


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


def percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.2f} %"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def spread(runs: Sequence[Run], key: str) -> str:
    values = [run[key] for run in runs]
    return f"{percent(statistics.median(values))} ({100 * min(values):.2f} to {100 * max(values):.2f})"


def by_policy(runs: Iterable[Run]) -> list[tuple[str, list[Run]]]:
    """In the order in which they came."""
    return [(name, list(group)) for name, group in groupby(runs, key=lambda run: str(run["policy"]))]


def show_sampled(runs: Sequence[Run]) -> None:
    skipped = [run for run in runs if run["unserved"] == "skipped"]
    print(f"\n## Sampled to {DEMAND:.0%} of the capacity, nobody leaves, who cannot be served at once goes away")
    print(f"\nMedian over {len({run['seed'] for run in skipped})} seeds (least to most).")
    table(
        (
            "placement",
            "GPU capacity allocated",
            "when the first did not fit",
            "of what is free, of no use",
            "decisions/s",
            "quoted",
        ),
        (
            (
                name,
                spread(group, "allocated"),
                percent(middle(group, "allocated_at_first_miss")),
                percent(middle(group, "fragmented_of_free")),
                f"{middle(group, 'speed', 'per_s'):,.0f}",
                percent(QUOTED["allocated"].get(name)),  # type: ignore[attr-defined]
            )
            for name, group in by_policy(skipped)
        ),
    )
    print(f"\nQuoted: {QUOTED['what']} ({QUOTED['source']}).")
    queued = [run for run in runs if run["unserved"] == "queued"]
    print(f"\nThe same, but who cannot be served waits ({len({run['seed'] for run in queued})} seeds):")
    table(
        ("queue", "GPU capacity allocated", "waiting at the end", "decisions/s"),
        (
            (
                name,
                spread(group, "allocated"),
                f"{middle(group, 'waiting'):,.0f}",
                f"{middle(group, 'speed', 'per_s'):,.0f}",
            )
            for name, group in by_policy(queued)
        ),
    )


def show_timed(runs: Sequence[Run]) -> None:
    def scenario(run: Run) -> tuple[float, float]:
        return run["node_fraction"], run["speedup"]

    for (fraction, speedup), group in groupby(runs, key=scenario):
        found = list(group)
        gpus = sorted({run["gpus"] for run in found})
        own_time = "in its own time" if speedup == 1 else f"with arrivals {speedup:g} times as fast"
        print(f"\n## The trace {own_time}, on {fraction:g} of the nodes ({' / '.join(map(str, gpus))} GPUs)")
        show_waits(by_policy(found))
        if any(run["most_waiting"] for run in found):
            show_sizes(by_policy(found))
        else:
            print("\nNobody waited.")


def show_waits(groups: Sequence[tuple[str, Sequence[Run]]]) -> None:
    head = ("policy", "waited", "wait p50 s", "p95 s", "p99 s", "longest s", "refused / never served")
    more = ("allocated", "while somebody waits", "of no use then", "decisions/s")
    table(
        (*head, *more),
        (
            (
                name,
                f"{middle(runs, 'wait_s', 'waited'):,.0f} of {middle(runs, 'tasks'):,.0f}",
                *(seconds(middle(runs, "wait_s", part)) for part in ("p50", "p95", "p99", "max")),
                f"{middle(runs, 'refused'):g} / {middle(runs, 'never_served'):g}",
                percent(middle(runs, "mean_allocated")),
                percent(middle(runs, "mean_allocated_while_somebody_waits")),
                percent(middle(runs, "mean_fragmented_while_somebody_waits")),
                f"{middle(runs, 'speed', 'per_s'):,.0f}",
            )
            for name, runs in groups
        ),
    )


def show_sizes(groups: Sequence[tuple[str, Sequence[Run]]]) -> None:
    columns = ("served", "waited", "p50", "p95", "p99", "max", "most_overtaken")
    table(
        ("policy", "asked for", "served", "waited", "p50 s", "p95 s", "p99 s", "longest s", "most overtaken"),
        (
            (name, size, *(seconds(middle(runs, "by_size", size, column)) for column in columns))
            for name, runs in groups
            for size in runs[0]["by_size"]
        ),
    )


def show(report: Run) -> None:
    trace = report["trace"]
    print(f"# Replay of a trace: {trace['nodes']:,} nodes, {trace['gpus']:,} GPUs, {trace['tasks']:,} tasks")
    print(
        f"\n{trace['tasks_with_gpu']:,} tasks ask for GPUs; {trace['without_gpu']:,} do not and are left out, as are "
        f"{trace['not_askable']:,} that name models in a way the pool cannot ask for."
    )
    table(("policy", "what it does"), ((policy["name"], policy["says"]) for policy in report["policies"]))
    show_sampled(report["sampled"])
    show_timed(report["timed"])
    print(f"\n{report['runs']} runs took {report['took_s']:.0f} s in {report['processes']} processes.")


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not more than 0")
        return value

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=Path, required=True, help="CSV of the nodes: sn, gpu, model")
    parser.add_argument("--pods", type=Path, required=True, help="CSV of the tasks: name, num_gpu, gpu_milli, ...")
    parser.add_argument("--seeds", type=positive(int), default=5, help="samples of tasks")
    parser.add_argument("--processes", type=positive(int), default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--quick", action="store_true", help="a sample of nodes and tasks, to see that it runs")
    options = parser.parse_args()
    source = Source(options.nodes, options.pods, options.quick)
    trace = load(source)
    began = time.monotonic()
    if options.quick:
        jobs = list(jobs_of(2, 1, [(fraction, speedup, 1) for fraction, speedup, _ in SCENARIOS]))
        processes = 1
    else:
        jobs, processes = list(jobs_of(options.seeds, 2, SCENARIOS)), options.processes
    runs = list(zip(jobs, run_all(source, jobs, processes), strict=True))
    report = {
        "schema": SCHEMA,
        "python": platform.python_version(),
        "is_quick": options.quick,
        "processes": processes,
        "runs": len(jobs),
        "took_s": time.monotonic() - began,
        "trace": {
            "nodes": len(trace.nodes),
            "gpus": trace.gpus,
            "tasks": len(trace.tasks) + trace.without_gpu + trace.not_askable,
            "tasks_with_gpu": len(trace.tasks),
            "without_gpu": trace.without_gpu,
            "not_askable": trace.not_askable,
        },
        "policies": [{"name": policy.name, "says": policy.says} for policy in POLICIES],
        "quoted": QUOTED,
        "sampled": [run for job, run in runs if job.experiment == "sampled"],
        "timed": [run for job, run in runs if job.experiment == "timed"],
    }
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
