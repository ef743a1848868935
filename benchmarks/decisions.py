"""How long one decision of the core takes as the pool grows: as many waiters as GPUs, all GPUs taken, mixed wishes.

Each size gets the same mix of commands in the same run, in rounds that alternate between the sizes; a decision is one
`step`: what was asked, what had expired, and the pass over the queue.
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

from crowded_pool import CrowdedPool
from fit import exponent
from lease_servers import high_water_mb
from results import Cell, Results, duration, parser
from rounds import percentile, spread_s

SIZES = (8, 100, 1_000, 10_000)
MOST_MS = 1.0
FLAT_FROM = 100
MOST_EXPONENT = 0.25
BLOCKS = 5

Times = dict[str, list[float]]


def decisions(pools: dict[int, CrowdedPool], rounds: int) -> dict[int, list[Times]]:
    """Seconds for each decision by kind of command, of each block of rounds, by size. The blocks take turns."""
    found: dict[int, list[Times]] = {gpus: [] for gpus in pools}
    for _ in range(BLOCKS):
        for gpus, pool in pools.items():
            block: Times = defaultdict(list)
            for _ in range(max(1, rounds // BLOCKS)):
                pool.round(block)
            found[gpus].append(block)
    return found


def peak_memory_mb(gpus: int, seed: int) -> float:
    """Peak memory that as many GPUs, leases and waiters add to a process of their own."""
    command = [sys.executable, __file__, "--fill", str(gpus), "--seed", str(seed)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def report(results: Results, found: dict[int, list[Times]], memory_mb: dict[int, float]) -> None:
    means: dict[int, float] = {}
    rows: list[list[Cell]] = []
    for gpus, blocks in found.items():
        times = [time for block in blocks for time in all_of(block)]
        block_means = [statistics.fmean(all_of(block)) for block in blocks]
        means[gpus] = statistics.median(block_means)
        rows.append(
            [
                f"{gpus:,}",
                round(1 / means[gpus]),
                duration(means[gpus]),
                spread_s(block_means),
                duration(statistics.median(times)),
                duration(percentile(times, 99)),
                memory_mb.get(gpus),
            ]
        )
    columns = ["GPUs, and as many waiters", "decisions/s", "mean", "mean, blocks", "p50", "p99", "memory, MB"]
    results.table(f"One decision, processor time, {BLOCKS} blocks in turn", columns, rows)
    kinds = list(dict.fromkeys(kind for blocks in found.values() for block in blocks for kind in block))
    by_kind: list[list[Cell]] = []
    for kind in kinds:
        of_sizes = ([time for block in blocks for time in block.get(kind, ())] for blocks in found.values())
        by_kind.append([kind, *(duration(statistics.fmean(times)) if times else None for times in of_sizes)])
    results.table("Mean by kind of decision", ["GPUs, and as many waiters", *(f"{gpus:,}" for gpus in found)], by_kind)
    largest = max(found)
    value_ms = 1000 * means[largest]
    results.figure(
        "decision_time",
        f"a decision at {largest:,} GPUs and {largest:,} waiters, mean",
        value=value_ms,
        unit="ms",
        target=f"<= {MOST_MS:g} ms at {SIZES[-1]:,}",
        is_met=value_ms <= MOST_MS,
        why="the reading after a release leads to a pass over the queue, which takes most of it (see the kinds)",
    )
    from_here = {gpus: mean for gpus, mean in means.items() if gpus >= FLAT_FROM}
    is_known = len(from_here) > 1
    power = exponent(from_here) if is_known else None
    results.figure(
        "decision_growth",
        f"growth of a decision from {FLAT_FROM} GPUs on: the exponent",
        value=power,
        unit="",
        target=f"near flat: <= {MOST_EXPONENT}",
        is_met=None if power is None else power <= MOST_EXPONENT,
        why="the indexes of the larger pools no longer fit the processor's caches" if is_known else "one size only",
    )


def all_of(block: Times) -> list[float]:
    return list(itertools.chain.from_iterable(block.values()))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--fill", type=int, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.fill is not None:
        before_mb = high_water_mb(os.getpid())
        CrowdedPool(options.fill, random.Random(options.seed)).fill()
        print(high_water_mb(os.getpid()) - before_mb)
        return
    results = Results("decisions", "How long one decision of the core takes as the pool grows.")
    sizes, rounds = (SIZES[:2], 10) if options.quick else (SIZES, 400)
    pools = {gpus: CrowdedPool(gpus, random.Random(options.seed)) for gpus in sizes}
    for pool in pools.values():
        pool.fill()
    gc.collect()
    gc.freeze()
    found = decisions(pools, rounds)
    memory_mb = {gpus: peak_memory_mb(gpus, options.seed) for gpus in (sizes[-1:] if options.quick else sizes)}
    report(results, found, memory_mb)
    results.finish(options)


if __name__ == "__main__":
    main()
