"""How long one decision of the core takes as the pool grows: as many waiters as GPUs, all GPUs taken, mixed wishes.

Each size gets the same mix of commands in the same run, in blocks that alternate between the sizes and between two
workloads. The queue is served by kinds of wishes. In one workload it has a few kinds; in the other, each waiter that
shares a GPU has a kind of its own. A decision is one `step`: the command, what had expired, and the passes over the
queue. The targets apply to the mean of the slowest kind of decision, in the workload where it is slower, and to the kind
that grows most: by the fit over all sizes or by the last step, whichever is greater.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from benchmarks.shared.crowded_pool import SHARING, TURNOVER, CrowdedPool
from benchmarks.shared.fit import exponent, last_exponent
from benchmarks.shared.processes import high_water_mb
from benchmarks.shared.results import Cell, Results, duration, parser, show
from benchmarks.shared.rounds import percentile, spread, spread_s
from benchmarks.shared.servers import ROOT
from benchmarks.shared.targets import bounded

SIZES = (8, 100, 1_000, 10_000)
MOST_MS = 1.0
FLAT_FROM = 100
MOST_EXPONENT = 0.25
BLOCKS = 5
FEW_KINDS, OWN_SIZES = "few kinds", "own sizes"
WORKLOADS = (FEW_KINDS, OWN_SIZES)

Times = Mapping[str, list[float]]


@dataclass
class Found:
    """What one workload took at one size: for each block, seconds by kind of decision, and the queue after it."""

    blocks: list[Times] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def of_blocks(self, decision: str | None) -> list[list[float]]:
        """Return the times of each block; None stands for all kinds of decisions."""
        if decision is None:
            return [list(itertools.chain.from_iterable(block.values())) for block in self.blocks]
        return [block.get(decision, []) for block in self.blocks]

    def times(self, decision: str | None = None) -> list[float]:
        return list(itertools.chain.from_iterable(self.of_blocks(decision)))

    def mean(self, decision: str | None = None) -> float:
        return statistics.fmean(self.times(decision))

    def block_means(self, decision: str | None = None) -> list[float]:
        return [statistics.fmean(times) for times in self.of_blocks(decision) if times]

    def usual(self) -> list[str]:
        """Return the kinds of decisions that were in every block; the mean of a rare kind would say little."""
        return [decision for decision in self.blocks[0] if all(block.get(decision) for block in self.blocks)]


By = dict[str, dict[int, Found]]  # workload, then size


def pools_of(gpus: int, seed: int) -> dict[str, CrowdedPool]:
    """Return the same pool in use for each workload. They differ in the last requests to join the queue, and in later ones."""
    used = CrowdedPool(gpus, random.Random(seed))
    used.fill()
    used.use()
    pools = {FEW_KINDS: used, OWN_SIZES: deepcopy(used)}
    for workload, pool in pools.items():
        pool.has_own_sizes = workload == OWN_SIZES
        pool.let_share()
    return pools


def measure(sizes: Sequence[int], rounds: int, seed: int) -> By:
    """Measure the sizes and workloads in turn, block by block."""
    found: By = {workload: {gpus: Found() for gpus in sizes} for workload in WORKLOADS}
    pools = {gpus: pools_of(gpus, seed) for gpus in sizes}
    gc.collect()
    gc.freeze()
    for block in range(BLOCKS):
        for gpus in sizes:
            # The same number of rounds changes a small pool more than a large one, so a small pool is made again.
            if block and rounds > gpus * TURNOVER / 10:
                pools[gpus] = pools_of(gpus, seed + block)
            for workload, pool in pools[gpus].items():
                taken: dict[str, list[float]] = defaultdict(list)
                for _ in range(rounds):
                    pool.round(taken)
                into = found[workload][gpus]
                into.blocks.append(taken)
                into.kinds.append(pool.kinds)
    return found


def peak_memory_mb(gpus: int, seed: int) -> float:
    """Return the peak memory that this many GPUs, leases and waiters add to a process of their own."""
    command = [sys.executable, "-m", "benchmarks.decisions", "--fill", str(gpus), "--seed", str(seed)]
    return float(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


def growth(of_sizes: Mapping[int, Found], decision: str | None) -> tuple[float, float, list[float]] | None:
    """Return the exponent from `FLAT_FROM` GPUs on, that of the last step, and the first for each block.

    Returns None if there are fewer than two such sizes.
    """
    large = {gpus: found for gpus, found in of_sizes.items() if gpus >= FLAT_FROM}
    if len(large) < 2 or any(len(found.block_means(decision)) < BLOCKS for found in large.values()):
        return None
    means = {gpus: found.mean(decision) for gpus, found in large.items()}
    by_block = [
        exponent({gpus: found.block_means(decision)[block] for gpus, found in large.items()}) for block in range(BLOCKS)
    ]
    return exponent(means), last_exponent(means), by_block


def report(results: Results, found: By) -> None:
    sizes = list(found[FEW_KINDS])
    results.note(
        f"Before it is measured, a pool is in use until {TURNOVER:g} leases for each GPU have ended. {SHARING:.0%} of the "
        f"waiters want to share a GPU. In the workload '{FEW_KINDS}' they ask for one of a few sizes. In '{OWN_SIZES}' each "
        "asks for its own number of MB, so that there are about as many kinds of wishes as such waiters."
    )
    rows: list[list[Cell]] = []
    for gpus, workload in itertools.product(sizes, WORKLOADS):
        of = found[workload][gpus]
        times = of.times()
        rows.append(
            [
                f"{gpus:,}, {workload}",
                int(statistics.median(of.kinds)),
                round(1 / of.mean()),
                duration(of.mean()),
                spread_s(of.block_means()),
                duration(statistics.median(times)),
                duration(percentile(times, 99)),
            ]
        )
    results.table(
        f"One decision, all kinds together, processor time, {BLOCKS} alternating blocks",
        [
            "GPUs, and as many waiters",
            "kinds of wishes",
            "decisions/s",
            "mean",
            "blocks",
            "p50",
            "p99",
        ],
        rows,
        note="The number of kinds is the median of the blocks.",
    )
    by_decision: list[list[Cell]] = []
    all_found = [one for of_sizes in found.values() for one in of_sizes.values()]
    decisions = dict.fromkeys(decision for one in all_found for block in one.blocks for decision in block)
    for decision, workload in itertools.product([*decisions, None], WORKLOADS):
        of_sizes = found[workload]
        grows = growth(of_sizes, decision)
        by_decision.append(
            [
                f"{decision or 'all'}, {workload}",
                *(duration(one.mean(decision)) if one.times(decision) else None for one in of_sizes.values()),
                spread_s(at_largest) if (at_largest := of_sizes[sizes[-1]].block_means(decision)) else None,
                *(
                    (f"{grows[0]:.2f}", f"{min(grows[2]):.2f} to {max(grows[2]):.2f}", f"{grows[1]:.2f}")
                    if grows
                    else (None, None, None)
                ),
            ]
        )
    results.table(
        "Mean by kind of decision",
        [
            "GPUs, and as many waiters",
            *(f"{gpus:,}" for gpus in sizes),
            "blocks at the largest",
            f"exponent from {FLAT_FROM} on",
            "blocks",
            "last step",
        ],
        by_decision,
        note="Exponent: 0 is flat, 1 is in proportion. The last step is that from the second largest size to the largest.",
    )


def judge(results: Results, found: By) -> None:
    """Compare the slowest kind of decision of both workloads at the largest size with its targets."""
    largest = max(found[FEW_KINDS])
    seen = dict.fromkeys(decision for name in WORKLOADS for block in found[name][largest].blocks for decision in block)
    judged = [decision for decision in seen if all(decision in found[name][largest].usual() for name in WORKLOADS)]
    rare = [decision for decision in seen if decision not in judged]
    _, workload, slowest = max(
        (found[workload][largest].mean(decision), workload, decision)
        for workload in WORKLOADS
        for decision in found[workload][largest].usual()
    )
    of = found[workload][largest]
    value_ms = 1000 * of.mean(slowest)
    beside = " and ".join(
        f"{duration(found[name][largest].mean(slowest))} with {show(statistics.median(found[name][largest].kinds))}"
        for name in WORKLOADS
    )
    bounded(
        results,
        "decision_time",
        f"mean processor time of the slowest kind of decision at {largest:,} GPUs and {largest:,} waiters: {slowest} "
        f"({workload})",
        value_ms,
        "ms",
        most=MOST_MS,
        spread=f"blocks: {spread_s(of.block_means(slowest))}; its p99: {duration(percentile(of.times(slowest), 99))}; "
        f"all kinds together: mean {duration(of.mean())}, p99 {duration(percentile(of.times(), 99))}; kinds: "
        f"{', '.join(judged)}; too rare to judge in a workload: {', '.join(rare) or 'none'}",
        why=f"it takes {beside} kinds of wishes in the queue; a reading that frees nothing takes {duration(of.mean('reading'))}, so "
        "the passes over the queue take most of the time",
    )
    judge_growth(results, found, slowest)


def judge_growth(results: Results, found: By, slowest: str) -> None:
    """Compare the kind of decision that grows most with its target; `slowest` is the one that takes longest."""
    grown = {
        (name, decision): grows
        for name in WORKLOADS
        for decision in found[name][max(found[name])].usual()
        if (grows := growth(found[name], decision)) is not None
    }
    what = (
        f"growth of a decision from {FLAT_FROM} GPUs and waiters on, by the fit or by the last step: the greatest exponent of "
        "any kind"
    )
    if not grown:
        bounded(results, "decision_growth", what, None, "", most=MOST_EXPONENT, why="one size only")
        return
    worst = max(grown, key=lambda kind: max(grown[kind][:2]))
    (workload, decision), (fit, last, by_block) = worst, grown[worst]
    of_slowest = max(max(grows[:2]) for (_, other), grows in grown.items() if other == slowest)
    largest = max(found[workload])
    small, large = found[workload][FLAT_FROM], found[workload][largest]
    bounded(
        results,
        "decision_growth",
        f"{what}: {decision} ({workload})",
        max(fit, last),
        "",
        most=MOST_EXPONENT,
        spread=f"fit {show(fit)}, blocks: {spread(by_block)}; last step {show(last)}; the slowest kind, {slowest}: {show(of_slowest)}",
        why=f"from {FLAT_FROM} to {largest:,} GPUs it grows from {duration(small.mean(decision))} to "
        f"{duration(large.mean(decision))}, the kinds of wishes in the queue from {show(statistics.median(small.kinds))} "
        f"to {show(statistics.median(large.kinds))}",
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--fill", type=int, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.fill is not None:
        before_mb = high_water_mb(os.getpid())
        pool = CrowdedPool(options.fill, random.Random(options.seed))
        pool.fill()
        pool.let_share()
        print(high_water_mb(os.getpid()) - before_mb)
        return
    results = Results("decisions", "How long one decision of the core takes as the pool grows.")
    sizes, rounds = (SIZES[:2], 2) if options.quick else (SIZES, 20)
    found = measure(sizes, rounds, options.seed)
    report(results, found)
    with_memory = sizes[-1:] if options.quick else sizes
    results.table(
        f"Peak memory of a newly filled pool, {FEW_KINDS}",
        ["GPUs, and as many waiters", *(f"{gpus:,}" for gpus in with_memory)],
        [["MB", *(peak_memory_mb(gpus, options.seed) for gpus in with_memory)]],
    )
    judge(results, found)
    results.finish(options)


if __name__ == "__main__":
    main()
