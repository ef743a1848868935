"""The runs of a replay, and how they are spread over processes."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks.replay.limits import DECLARED, NOBODY, VARIANTS, declare
from benchmarks.replay.openb import Trace, cut, read_trace, sample_nodes
from benchmarks.replay.policies import OURS, POLICIES, Rule
from benchmarks.replay.runs import run_sampled, run_timed
from benchmarks.replay.synthetic import Load, synthetic
from benchmarks.replay.tables import Run

DEMAND = 1.3
NEEDS_FORESIGHT = "FGD"
QUICK_NODES, QUICK_TASKS = 40, 300
QUICK_LOAD = Load(lasts_s=3 * 3600.0)
# The earlier rule is made here without indexes, so it is too slow for many GPUs.
MOST_OF_THE_NODES_HELD = 0.05
MOST_GPUS_TOLD = 100


@dataclass(frozen=True)
class Job:
    """One run, as it is handed to another process."""

    experiment: str
    policy: int
    seed: int
    is_queued: bool = False
    fraction: float = 1.0
    speedup: float = 1.0
    declared: str = NOBODY.name

    def __str__(self) -> str:
        what = ("queued" if self.is_queued else "skipped") if self.experiment == "sampled" else self.scenario
        return f"{self.experiment}, {what}, {POLICIES[self.policy].name}, {self.declared}, seed {self.seed}"

    @property
    def scenario(self) -> str:
        return f"{self.fraction:g} of the nodes, arrivals at {self.speedup:g}x"


@dataclass(frozen=True)
class Source:
    """The files of the trace, and whether only a sample of it is wanted."""

    nodes: Path
    pods: Path
    is_quick: bool


@lru_cache(maxsize=1)
def load(source: Source) -> Trace:
    """Load the trace, once in each process."""
    trace = read_trace(source.nodes, source.pods)
    return cut(trace, QUICK_NODES, QUICK_TASKS, seed=1) if source.is_quick else trace


def carry_out(source: Source, job: Job) -> Run:
    trace, policy = load(source), POLICIES[job.policy]
    if job.experiment == "sampled":
        return run_sampled(trace, policy, DEMAND, job.seed, is_queued=job.is_queued)
    if job.experiment == "synthetic":
        trace = synthetic(QUICK_LOAD if source.is_quick else Load(), job.seed)
    else:
        trace = sample_nodes(trace, job.fraction, job.seed)
    declaring = declare(trace, DECLARED[job.declared], job.seed)
    # To tell when each waiter starts takes all GPUs into account.
    asks_when = policy is OURS and trace.gpus <= MOST_GPUS_TOLD
    run = run_timed(declaring, policy, job.fraction, job.speedup, job.seed, asks_when=asks_when)
    return run | {"declared": job.declared}


def jobs_of(seeds: int, queued_seeds: int, scenarios: Iterable[tuple[float, float, int]]) -> Iterator[Job]:
    """Yield the runs with tasks that are drawn, and those of the trace in its own time."""
    yield from sampled_jobs(seeds, queued_seeds)
    for fraction, speedup, choices in scenarios:
        # Choices of nodes may differ much, so policies are compared on each choice, never across choices.
        for seed in range(1, choices + 1):
            for number, policy in enumerate(POLICIES):
                if policy.name != NEEDS_FORESIGHT and (policy.rule is not Rule.HOLDS or _is_small(fraction)):
                    yield Job("timed", number, seed, fraction=fraction, speedup=speedup)
            if _is_small(fraction) and seed == 1:
                yield from (
                    Job("timed", POLICIES.index(OURS), seed, fraction=fraction, speedup=speedup, declared=variant.name)
                    for variant in VARIANTS
                    if variant is not NOBODY
                )


def synthetic_jobs(seeds: int) -> Iterator[Job]:
    """Yield the runs of the synthetic load. Only our rule depends on time limits."""
    for number, policy in enumerate(POLICIES):
        if policy is OURS or not policy.is_placement:
            for variant in VARIANTS if policy is OURS else (NOBODY,):
                yield from (Job("synthetic", number, seed, declared=variant.name) for seed in range(1, seeds + 1))


def _is_small(fraction: float) -> bool:
    return fraction <= MOST_OF_THE_NODES_HELD


def sampled_jobs(seeds: int, queued_seeds: int) -> Iterator[Job]:
    """Yield the runs with tasks that are drawn, of which none ends."""
    for number, policy in enumerate(POLICIES):
        if policy.is_placement:
            yield from (Job("sampled", number, seed) for seed in range(1, seeds + 1))
        if policy is OURS or policy.rule in (Rule.UNRESERVED, Rule.STRICT):
            yield from (Job("sampled", number, seed, is_queued=True) for seed in range(1, queued_seeds + 1))


def run_all(source: Source, jobs: Sequence[Job], processes: int) -> list[Run]:
    """Run the jobs, and return their results in the same order."""
    if processes == 1:
        return [_told(job, carry_out(source, job)) for job in jobs]
    # The long jobs come first, so that no process is left with one at the end.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = {job: pool.submit(carry_out, source, job) for job in sorted(jobs, key=lambda job: -job.speedup)}
        return [_told(job, futures[job].result()) for job in jobs]


def _told(job: Job, run: Run) -> Run:
    print(f"done: {job}", file=sys.stderr)
    return run
