"""Replay a trace of a real GPU cluster through the core, in simulated time, with our rules and with others.

    python -m benchmarks.replay --nodes openb_node_list_gpu_node.csv --pods openb_pod_list_default.csv

The trace is Alibaba's OpenB 2023; openb.py describes its format and how it is used. There are two experiments:

- sampled: tasks are drawn until they ask for 130 % of all GPUs. They come one by one, and none ends. How much of the GPUs
  can be allocated? A task that cannot be served at once goes away again. Then the same with a queue, where it waits.
- timed: the trace in its own time, with tasks that end, on a fraction of its nodes; then with faster arrivals.

Every number is measured in this run, except for those that are marked as quoted.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.replay.jobs import DEMAND, Source, jobs_of, load, run_all
from benchmarks.replay.policies import POLICIES
from benchmarks.replay.tables import tell_policies, tell_sampled, tell_timed, tell_trace, trace_in_short
from benchmarks.shared.results import Results, parser

# The fraction of the nodes, how many times as fast tasks arrive, and the number of choices of the nodes.
SCENARIOS = ((1.0, 1.0, 1), (0.5, 1.0, 1), (0.25, 1.0, 1), (0.01, 1.0, 3), (0.25, 1000.0, 1))


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} must be more than 0")
        return value

    return read


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--nodes", type=Path, required=True, help="CSV of the nodes: sn, gpu, model")
    options_of.add_argument("--pods", type=Path, required=True, help="CSV of the tasks: name, num_gpu, gpu_milli, ...")
    options_of.add_argument("--seeds", type=positive(int), default=4, help="samples of tasks")
    options_of.add_argument("--processes", type=positive(int), default=min(2, os.cpu_count() or 1))
    options_of.add_argument(
        "--runs", type=Path, metavar="FILE", help="write each run, with all its values, to this file"
    )
    options = options_of.parse_args()
    source = Source(options.nodes, options.pods, options.quick)
    trace = load(source)
    results = Results(
        "replay",
        "A trace of a real cluster, replayed through the core in simulated time, with our rules and with others.",
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
