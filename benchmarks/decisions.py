"""How long one decision of the core takes as the pool grows: all GPUs taken, as many waiters or more, mixed wishes.

Each size gets the same mix of commands in the same run, in blocks that alternate between the sizes and between two
workloads. The queue is served by kinds of wishes. In one workload it has a few kinds; in the other, each waiter that
shares a GPU has a kind of its own. A decision is one `step`: the command, what had expired, and the passes over the
queue. The targets apply to the mean of the slowest kind of decision, in the workload where it is slower.
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
from typing import NamedTuple

from benchmarks.shared.crowded_pool import SHARING, TURNOVER, CrowdedPool
from benchmarks.shared.processes import high_water_mb
from benchmarks.shared.results import Cell, Results, duration, parser, show
from benchmarks.shared.rounds import percentile, spread_s
from benchmarks.shared.servers import ROOT
from benchmarks.shared.targets import bounded


class Size(NamedTuple):
    gpus: int
    waiters: int

    def __str__(self) -> str:
        return f"{self.gpus:,} GPUs, {self.waiters:,} waiters"


SMALL, LARGE, HUGE = Size(8, 8), Size(512, 1_000), Size(10_000, 10_000)
SIZES = (SMALL, LARGE, HUGE)
# The figure of a size, and the milliseconds that its slowest kind of decision may take.
TARGETS = {LARGE: ("decision_512_gpus", 1.0), HUGE: ("decision_10000_gpus", 25.0)}
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


By = dict[str, dict[Size, Found]]  # workload, then size


def pools_of(size: Size, seed: int) -> dict[str, CrowdedPool]:
    """Return the same pool in use for each workload. They differ in the last requests to join the queue, and in later ones."""
    used = CrowdedPool(size.gpus, random.Random(seed), size.waiters)
    used.fill()
    used.use()
    pools = {FEW_KINDS: used, OWN_SIZES: deepcopy(used)}
    for workload, pool in pools.items():
        pool.has_own_sizes = workload == OWN_SIZES
        pool.let_share()
    return pools


def measure(sizes: Sequence[Size], rounds: int, seed: int) -> By:
    """Measure the sizes and workloads in turn, block by block."""
    found: By = {workload: {size: Found() for size in sizes} for workload in WORKLOADS}
    pools = {size: pools_of(size, seed) for size in sizes}
    gc.collect()
    gc.freeze()
    for block in range(BLOCKS):
        for size in sizes:
            # The same number of rounds changes a small pool more than a large one, so a small pool is made again.
            if block and rounds > size.gpus * TURNOVER / 10:
                pools[size] = pools_of(size, seed + block)
            for workload, pool in pools[size].items():
                taken: dict[str, list[float]] = defaultdict(list)
                for _ in range(rounds):
                    pool.round(taken)
                into = found[workload][size]
                into.blocks.append(taken)
                into.kinds.append(pool.kinds)
    return found


def peak_memory_mb(size: Size, seed: int) -> float:
    """Return the peak memory that this many GPUs, leases and waiters add to a process of their own."""
    command = [sys.executable, "-m", "benchmarks.decisions", "--fill", *map(str, size), "--seed", str(seed)]
    return float(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


def report(results: Results, found: By) -> None:
    sizes = list(found[FEW_KINDS])
    results.note(
        f"Before it is measured, a pool is in use until {TURNOVER:g} leases for each GPU have ended. {SHARING:.0%} of the "
        f"waiters want to share a GPU. In the workload '{FEW_KINDS}' they ask for one of a few sizes. In '{OWN_SIZES}' each "
        "asks for its own number of MB, so that there are about as many kinds of wishes as such waiters."
    )
    rows: list[list[Cell]] = []
    for size, workload in itertools.product(sizes, WORKLOADS):
        of = found[workload][size]
        times = of.times()
        rows.append(
            [
                f"{size}, {workload}",
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
        ["", "kinds of wishes", "decisions/s", "mean", "blocks", "p50", "p99"],
        rows,
        note="The number of kinds is the median of the blocks.",
    )
    by_decision: list[list[Cell]] = []
    all_found = [one for of_sizes in found.values() for one in of_sizes.values()]
    decisions = dict.fromkeys(decision for one in all_found for block in one.blocks for decision in block)
    for decision, workload in itertools.product([*decisions, None], WORKLOADS):
        of_sizes = found[workload]
        at_largest = of_sizes[sizes[-1]].block_means(decision)
        by_decision.append(
            [
                f"{decision or 'all'}, {workload}",
                *(duration(one.mean(decision)) if one.times(decision) else None for one in of_sizes.values()),
                spread_s(at_largest) if at_largest else None,
            ]
        )
    results.table("Mean by kind of decision", ["", *map(str, sizes), "blocks at the largest"], by_decision)


def judge(results: Results, found: By) -> None:
    """Compare the slowest kind of decision of both workloads with the target of each size."""
    for size, (figure_id, most_ms) in TARGETS.items():
        what = f"mean processor time of the slowest kind of decision, {size}"
        if size in found[FEW_KINDS]:
            _judge(results, {name: of_sizes[size] for name, of_sizes in found.items()}, figure_id, what, most_ms)
        else:
            bounded(results, figure_id, what, None, "ms", most=most_ms, why="a quick run leaves out this size")


def _judge(results: Results, found: Mapping[str, Found], figure_id: str, what: str, most_ms: float) -> None:
    seen = dict.fromkeys(decision for of in found.values() for block in of.blocks for decision in block)
    judged = [decision for decision in seen if all(decision in of.usual() for of in found.values())]
    rare = [decision for decision in seen if decision not in judged]
    _, workload, slowest = max(
        (of.mean(decision), name, decision) for name, of in found.items() for decision in of.usual()
    )
    of = found[workload]
    beside = " and ".join(
        f"{duration(each.mean(slowest))} with {show(statistics.median(each.kinds))}" for each in found.values()
    )
    bounded(
        results,
        figure_id,
        f"{what}: {slowest} ({workload})",
        1000 * of.mean(slowest),
        "ms",
        most=most_ms,
        spread=f"blocks: {spread_s(of.block_means(slowest))}; its p99: {duration(percentile(of.times(slowest), 99))}; "
        f"all kinds together: mean {duration(of.mean())}, p99 {duration(percentile(of.times(), 99))}; kinds: "
        f"{', '.join(judged)}; too rare to judge in a workload: {', '.join(rare) or 'none'}",
        why=f"it takes {beside} kinds of wishes in the queue; a reading that frees nothing takes {duration(of.mean('reading'))}, so "
        "the passes over the queue take most of the time",
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--fill", type=int, nargs=2, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.fill is not None:
        before_mb = high_water_mb(os.getpid())
        gpus, waiters = options.fill
        pool = CrowdedPool(gpus, random.Random(options.seed), waiters)
        pool.fill()
        pool.let_share()
        print(high_water_mb(os.getpid()) - before_mb)
        return
    results = Results("decisions", "How long one decision of the core takes as the pool grows.")
    sizes, rounds = ((SMALL, LARGE), 2) if options.quick else (SIZES, 20)
    found = measure(sizes, rounds, options.seed)
    report(results, found)
    results.table(
        f"Peak memory of a newly filled pool, {FEW_KINDS}",
        ["", *map(str, sizes)],
        [["MB", *(peak_memory_mb(size, options.seed) for size in sizes)]],
    )
    judge(results, found)
    results.finish(options)


if __name__ == "__main__":
    main()
