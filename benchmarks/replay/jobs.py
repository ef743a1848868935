"""The runs of a replay, and how they are spread over processes."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks.replay.limits import ALL_EXACT, DECLARED, NOBODY, VARIANTS, declare
from benchmarks.replay.lists import DEFAULT, LISTS, read_list
from benchmarks.replay.openb import Trace, cut, few_nodes, sample_nodes
from benchmarks.replay.policies import OURS, POLICIES, Rule
from benchmarks.replay.runs import run_sampled, run_timed
from benchmarks.replay.synthetic import Load, synthetic
from benchmarks.replay.tables import Run

DEMAND = 1.3
FORESIGHT = "FGD"
# The default list is replayed on this fraction of the nodes; every other one on so many that they are as busy.
FEW = 0.01
FEW_SEED = 1
QUICK_NODES, QUICK_TASKS = 40, 300
QUICK_LOAD = Load(lasts_s=3 * 3600.0)


@dataclass(frozen=True)
class Job:
    """One run, as it is handed to another process."""

    experiment: str
    policy: int
    seed: int = FEW_SEED
    tasks: str = DEFAULT
    declared: str = NOBODY.name

    def __str__(self) -> str:
        return f"{self.experiment}, {self.tasks}, {POLICIES[self.policy].name}, {self.declared}, seed {self.seed}"


@dataclass(frozen=True)
class Source:
    """The files of the trace, and whether only a sample of it is wanted."""

    nodes: Path
    pods: Path
    is_quick: bool


@lru_cache(maxsize=len(LISTS) + 1)
def load(source: Source, tasks: str = DEFAULT) -> Trace:
    """Load the trace with a list of tasks, once in each process."""
    trace = read_list(source.nodes, source.pods, tasks)
    return cut(trace, QUICK_NODES, QUICK_TASKS, seed=1) if source.is_quick else trace


def on_few_nodes(source: Source, tasks: str) -> Trace:
    """Return the trace on so few nodes that tasks wait."""
    default = sample_nodes(load(source), FEW, FEW_SEED)
    if tasks == DEFAULT:
        return default
    trace = load(source, tasks)
    return few_nodes(trace, round(default.gpus * trace.asked_milli_s / default.asked_milli_s), FEW_SEED)


def carry_out(source: Source, job: Job) -> Run:
    policy = POLICIES[job.policy]
    if job.experiment == "sampled":
        return run_sampled(load(source, job.tasks), policy, DEMAND, job.seed) | {"list": job.tasks}
    if job.experiment == "synthetic":
        trace = synthetic(QUICK_LOAD if source.is_quick else Load(), job.seed)
    else:
        trace = on_few_nodes(source, job.tasks)
    declaring = declare(trace, DECLARED[job.declared], job.seed)
    run = run_timed(declaring, policy, job.seed, asks_when=policy is OURS and job.tasks == DEFAULT)
    return run | {"declared": job.declared, "list": job.tasks}


def sampled_jobs(tasks: str, seeds: int) -> Iterator[Job]:
    """Yield the runs with tasks that are drawn, of which none ends."""
    for number, policy in enumerate(POLICIES):
        if policy.is_placement:
            yield from (Job("sampled", number, seed, tasks) for seed in range(1, seeds + 1))


def timed_jobs(tasks: str) -> Iterator[Job]:
    """Yield the runs of a list in its own time. Only our rule depends on time limits."""
    for number, policy in enumerate(POLICIES):
        if policy is OURS:
            variants = VARIANTS if tasks == DEFAULT else (NOBODY, ALL_EXACT)
            yield from (Job("timed", number, tasks=tasks, declared=variant.name) for variant in variants)
        elif policy.name != FORESIGHT if tasks == DEFAULT else policy.rule in {Rule.UNRESERVED, Rule.EASY}:
            yield Job("timed", number, tasks=tasks)


def synthetic_jobs(seeds: int) -> Iterator[Job]:
    """Yield the runs of the synthetic load. Only our rule depends on time limits."""
    for number, policy in enumerate(POLICIES):
        if policy is OURS or not policy.is_placement:
            for variant in VARIANTS if policy is OURS else (NOBODY,):
                yield from (Job("synthetic", number, seed, declared=variant.name) for seed in range(1, seeds + 1))


def run_all(source: Source, jobs: Sequence[Job], processes: int) -> list[Run]:
    """Run the jobs, and return their results in the same order."""
    if processes == 1:
        return [_told(job, carry_out(source, job)) for job in jobs]
    # The short jobs come last, so that no process is left with a long one at the end.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        in_turn = sorted(jobs, key=lambda job: job.experiment == "synthetic")
        futures = {job: pool.submit(carry_out, source, job) for job in in_turn}
        return [_told(job, futures[job].result()) for job in jobs]


def _told(job: Job, run: Run) -> Run:
    print(f"done: {job}", file=sys.stderr)
    return run
