"""Replay a trace of a real GPU cluster through the core, in simulated time, with our rules and with others.

    python -m benchmarks.replay --nodes openb_node_list_gpu_node.csv --pods openb_pod_list_default.csv --variants

The trace is Alibaba's OpenB 2023; openb.py describes its format and how it is used. There are three experiments:

- sampled: tasks are drawn until they ask for 130 % of all GPUs. They come one by one, and none ends. How much of the GPUs
  can be allocated? A task that cannot be served at once goes away again.
- timed: the trace in its own time, with tasks that end, on a few of its nodes, with time limits that no task, half of them or
  all declare. What waiters are told is compared with what happens.
- synthetic: the same with a load of our own (see synthetic.py).

With --variants the first two are made with other lists of tasks too: those published beside the default one, else lists that
are derived from it (see lists.py). EASY backfilling with exact time limits is the reference (see easy.py).

Every number is measured in this run, except for those that are marked as quoted.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.replay.jobs import DEMAND, Source, load, run_all, sampled_jobs, synthetic_jobs, timed_jobs
from benchmarks.replay.limit_tables import tell_limits, tell_other_lists, tell_synthetic
from benchmarks.replay.limits import NOBODY
from benchmarks.replay.list_tables import tell_allocated, tell_lists
from benchmarks.replay.lists import DEFAULT, LISTS, published_file
from benchmarks.replay.openb import NoTraceError
from benchmarks.replay.policies import POLICIES
from benchmarks.replay.tables import tell_policies, tell_sampled, tell_timed, tell_trace, trace_in_short
from benchmarks.shared.results import Results, parser

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
    options_of.add_argument("--variants", action="store_true", help="replay the other lists of tasks as well")
    options_of.add_argument("--seeds", type=positive(int), default=2, help="samples of tasks")
    options_of.add_argument("--processes", type=positive(int), default=min(2, os.cpu_count() or 1))
    options_of.add_argument(
        "--runs", type=Path, metavar="FILE", help="write each run, with all its values, to this file"
    )
    options = options_of.parse_args()
    source = Source(options.nodes, options.pods, options.quick)
    lists = [DEFAULT, *(one.name for one in LISTS if options.variants)]
    try:
        traces = {name: load(source, name) for name in lists}
    except NoTraceError as error:
        options_of.error(str(error))
    results = Results(
        "replay",
        "A trace of a real cluster, replayed through the core in simulated time, with our rules and with others.",
    )
    seeds, loads = (1, 1) if options.quick else (options.seeds, SYNTHETIC_SEEDS)
    jobs = [job for name in lists for job in sampled_jobs(name, seeds)]
    jobs += [job for name in lists if traces[name].has_times for job in timed_jobs(name)]
    jobs += synthetic_jobs(loads)
    runs = list(zip(jobs, run_all(source, jobs, 1 if options.quick else options.processes), strict=True))
    found = {name: [run for job, run in runs if job.experiment == name] for name in ("sampled", "timed", "synthetic")}
    timed = [run for run in found["timed"] if run["list"] == DEFAULT]
    tell_trace(results, traces[DEFAULT])
    if options.variants:
        published = [name for name in lists if name == DEFAULT or published_file(options.pods, name).is_file()]
        tell_lists(results, traces, published)
    tell_policies(results, POLICIES)
    tell_sampled(results, [run for run in found["sampled"] if run["list"] == DEFAULT], DEMAND)
    tell_allocated(results, found["sampled"], DEMAND)
    if timed:
        tell_timed(results, [run for run in timed if run["declared"] == NOBODY.name])
        tell_limits(results, timed)
    tell_other_lists(results, [run for run in found["timed"] if run["list"] != DEFAULT])
    tell_synthetic(results, found["synthetic"])
    results.finish(options)
    if options.runs:
        data = {"trace": trace_in_short(traces[DEFAULT]), **found}
        options.runs.write_text(json.dumps(data, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
