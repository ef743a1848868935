"""Replay a trace of a real GPU cluster through the core, in simulated time, with our rules and with others.

    python -m benchmarks.replay --nodes openb_node_list_gpu_node.csv --pods openb_pod_list_default.csv

The trace is Alibaba's OpenB 2023; openb.py describes its format and how it is used. There are three experiments:

- sampled: tasks are drawn until they ask for 130 % of all GPUs. They come one by one, and none ends. How much of the GPUs
  can be allocated? A task that cannot be served at once goes away again. Then the same with a queue, where it waits.
- timed: the trace in its own time, with tasks that end, on a fraction of its nodes; then with faster arrivals. On few nodes
  also with time limits that no task, half of them or all declare. What waiters are told is compared with what happens.
- synthetic: the same with a load of our own (see synthetic.py).

Every number is measured in this run, except for those that are marked as quoted.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.replay.jobs import DEMAND, Source, jobs_of, load, run_all, synthetic_jobs
from benchmarks.replay.limit_tables import tell_limits, tell_synthetic
from benchmarks.replay.limits import NOBODY
from benchmarks.replay.openb import NoTraceError
from benchmarks.replay.policies import POLICIES
from benchmarks.replay.tables import tell_policies, tell_sampled, tell_timed, tell_trace, trace_in_short
from benchmarks.shared.results import Results, parser

# The fraction of the nodes, how many times as fast tasks arrive, and the number of choices of the nodes.
SCENARIOS = ((1.0, 1.0, 1), (0.01, 1.0, 2), (0.25, 1000.0, 1))
SYNTHETIC_SEEDS = 10


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
    try:
        trace = load(source)
    except NoTraceError as error:
        options_of.error(str(error))
    results = Results(
        "replay",
        "A trace of a real cluster, replayed through the core in simulated time, with our rules and with others.",
    )
    seeds, choices, loads = (2, 1, 1) if options.quick else (options.seeds, None, SYNTHETIC_SEEDS)
    scenarios = [(part, speedup, choices or number) for part, speedup, number in SCENARIOS] if trace.has_times else []
    jobs = [*jobs_of(seeds, 1, scenarios), *synthetic_jobs(loads)]
    runs = list(zip(jobs, run_all(source, jobs, 1 if options.quick else options.processes), strict=True))
    found = {name: [run for job, run in runs if job.experiment == name] for name in ("sampled", "timed", "synthetic")}
    tell_trace(results, trace)
    tell_policies(results, POLICIES)
    tell_sampled(results, found["sampled"], DEMAND)
    tell_timed(results, [run for run in found["timed"] if run["declared"] == NOBODY.name])
    tell_limits(results, found["timed"])
    tell_synthetic(results, found["synthetic"])
    results.finish(options)
    if options.runs:
        data = {"trace": trace_in_short(trace), **found}
        options.runs.write_text(json.dumps(data, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
