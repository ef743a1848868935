"""Replays a trace of a real GPU cluster through the core, in simulated time, for our rules and for others beside them.

    python benchmarks/replay.py --nodes openb_node_list_gpu_node.csv --pods openb_pod_list_default.csv

The trace is Alibaba's OpenB 2023 (see openb.py for the format and for what is made of it). Two experiments:

- sampled: tasks are drawn until they ask for 130 % of all GPUs and come one by one; none goes. How much of the GPUs could be
  allocated? Who cannot be served at once goes away again. Then the same with a queue: who cannot be served waits.
- timed: the trace in its own time, with departures, on a fraction of its nodes; and with arrivals so many times as fast.

Every figure is measured in this run, except those that are marked as quoted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from openb import Trace, cut, read_trace, sample_nodes
from replay_policies import POLICIES
from replay_report import Run, tell_policies, tell_sampled, tell_timed, tell_trace, trace_in_short
from replay_runs import run_sampled, run_timed
from results import Results, parser

DEMAND = 1.3
# Fraction of the nodes, how many times as fast they come, choices of the nodes.
SCENARIOS = ((1.0, 1.0, 1), (0.5, 1.0, 1), (0.25, 1.0, 1), (0.01, 1.0, 3), (0.25, 1000.0, 1))
NEEDS_FORESIGHT = "FGD"
QUICK_NODES, QUICK_TASKS = 40, 300


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
        # Choices of nodes may be very unlike: the policies are compared on each, never across.
        for seed in range(1, choices + 1):
            for number, policy in enumerate(POLICIES):
                if policy.name != NEEDS_FORESIGHT:
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


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not more than 0")
        return value

    return read


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--nodes", type=Path, required=True, help="CSV of the nodes: sn, gpu, model")
    options_of.add_argument("--pods", type=Path, required=True, help="CSV of the tasks: name, num_gpu, gpu_milli, ...")
    options_of.add_argument("--seeds", type=positive(int), default=4, help="samples of tasks")
    options_of.add_argument("--processes", type=positive(int), default=min(2, os.cpu_count() or 1))
    options_of.add_argument(
        "--runs", type=Path, metavar="FILE", help="write each run, with all that it found, to this file"
    )
    options = options_of.parse_args()
    source = Source(options.nodes, options.pods, options.quick)
    trace = load(source)
    results = Results(
        "replay", "A trace of a real cluster through the core, in simulated time, for our rules and others."
    )
    if options.quick:
        jobs = list(jobs_of(2, 1, [(fraction, speedup, min(2, choices)) for fraction, speedup, choices in SCENARIOS]))
        processes = 1
    else:
        jobs, processes = list(jobs_of(options.seeds, 1, SCENARIOS)), options.processes
    runs = list(zip(jobs, run_all(source, jobs, processes), strict=True))
    sampled = [run for job, run in runs if job.experiment == "sampled"]
    timed = [run for job, run in runs if job.experiment == "timed"]
    tell_trace(results, trace)
    tell_policies(results, POLICIES)
    tell_sampled(results, sampled, DEMAND)
    tell_timed(results, timed)
    results.finish(options)
    if options.runs:
        data = {"trace": trace_in_short(trace), "sampled": sampled, "timed": timed}
        options.runs.write_text(json.dumps(data, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
