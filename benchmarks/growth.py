"""How costs grow with GPUs, waiters, endpoints and history, in steps of ten, and with which exponent.

A decision is measured in the core. A lease + release over HTTP and the start are those of a server that starts with a
journal of that size. A poll round is that of a client with that many endpoints. Every other pass over the sizes goes
backwards. There are two exponents: that of the last step of ten, because most costs are a constant plus a part that
grows, and the slope of the least-squares line through the logarithms of all sizes. 0 is flat, 1 is in proportion.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.leases.locks import PoolLease, cycle_s, who_asks
from benchmarks.shared.crowded_pool import CrowdedPool
from benchmarks.shared.fit import exponent, last_exponent
from benchmarks.shared.fleet import poll_round_s, statistics_servers
from benchmarks.shared.past_journal import GPUS_WAITED_FOR, NODE, write_journal
from benchmarks.shared.results import Cell, Results, duration, parser
from benchmarks.shared.rounds import in_turn, spread_s
from benchmarks.shared.servers import pool_process

SEED = 1
FEW = 100
# How long a pool is in use before a decision is measured, in ended leases for each GPU.
TURNOVER = 0.1
# More urgent than all waiters.
PRIORITY = 5
ROOMY = {
    "GPU_POOL_NODE": NODE,
    "GPU_POOL_MAX_QUEUED": "100000",
    "GPU_POOL_MAX_QUEUED_PER_OWNER": "100000",
    "GPU_POOL_MAX_LEASES_PER_OWNER": "100000",
}


@dataclass(frozen=True)
class Effort:
    """How much is measured. Polls have an interval in seconds and a number; the long ones are for the most endpoints."""

    decision_sizes: tuple[int, ...]
    decisions: int
    server_gpus: tuple[int, ...]
    waiters: tuple[int, ...]
    ended: tuple[int, ...]
    leases: int
    endpoints: tuple[int, ...]
    short_polls: tuple[float, int]
    long_polls: tuple[float, int]
    passes: int
    server_passes: int


QUICK = Effort(
    decision_sizes=(10, 100),
    decisions=4,
    server_gpus=(),
    waiters=(10, 100),
    ended=(10, 100),
    leases=5,
    endpoints=(1, 10),
    short_polls=(0.1, 2),
    long_polls=(0.1, 2),
    passes=1,
    server_passes=1,
)
WHOLE = Effort(
    decision_sizes=(10, 100, 1_000, 10_000),
    decisions=20,
    server_gpus=(10, 100, 1_000),
    waiters=(100, 1_000, 10_000),
    ended=(1_000, 10_000, 100_000),
    leases=30,
    endpoints=(10, 100, 1_000),
    short_polls=(0.15, 4),
    long_polls=(1.3, 1),
    passes=3,
    server_passes=2,
)


@dataclass
class Curve:
    """The cost at each size, in seconds, once for each pass."""

    what: str
    grows: str
    costs_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def medians_s(self) -> dict[int, float]:
        return {size: statistics.median(found) for size, found in self.costs_s.items()}


def decisions(effort: Effort) -> list[Curve]:
    """Measure decisions with more GPUs, and with more waiters; the other number stays at `FEW`."""
    return [
        _decisions(effort, "GPUs", lambda size: CrowdedPool(size, random.Random(SEED), FEW, has_own_sizes=True)),
        _decisions(effort, "waiters", lambda size: CrowdedPool(FEW, random.Random(SEED), size, has_own_sizes=True)),
    ]


def _decisions(effort: Effort, grows: str, make: Callable[[int], CrowdedPool]) -> Curve:
    pools = {size: make(size) for size in effort.decision_sizes}
    for pool in pools.values():
        pool.fill()
        pool.use(TURNOVER)
        pool.let_share()
    gc.collect()

    def mean_s(pool: CrowdedPool) -> float:
        taken: dict[str, list[float]] = defaultdict(list)
        for _ in range(effort.decisions):
            pool.round(taken)
        return statistics.fmean(chain.from_iterable(taken.values()))

    found = in_turn({str(size): partial(mean_s, pool) for size, pool in pools.items()}, effort.passes)
    return Curve(
        f"a decision, processor time, {FEW} {'waiters' if grows == 'GPUs' else 'GPUs'}", grows, _by_size(found)
    )


def servers(effort: Effort, folder: Path) -> list[Curve]:
    """Start a server for each size. Measure the time until it is ready, and that of a lease + release then."""
    curves: list[Curve] = []
    numbers = iter(range(1_000_000))
    for grows, sizes in (("GPUs", effort.server_gpus), ("waiters", effort.waiters), ("ended leases", effort.ended)):
        start, grant = Curve("start of a server", grows), Curve("lease + release over HTTP", grows)

        def one(size: int, grows: str = grows, start: Curve = start) -> float:
            state = folder / f"server-{next(numbers)}"
            past = folder / f"past-{state.name}"
            shutil.copytree(_past(folder, grows, size), past)
            gpus = f"{size if grows == 'GPUs' else GPUS_WAITED_FOR if grows == 'waiters' else 8}xT4"
            began = time.perf_counter()
            with pool_process(state, gpus, "normal", {**ROOMY, "GPU_POOL_STATE_DIR": str(past)}) as (port, _):
                start.costs_s[size].append(time.perf_counter() - began)
                return cycle_s(PoolLease(port, {**who_asks(), "model": "T4", "priority": PRIORITY}), effort.leases)

        grant.costs_s.update(_by_size(in_turn({str(size): partial(one, size) for size in sizes}, effort.server_passes)))
        curves += [start, grant]
    return curves


def _past(folder: Path, grows: str, size: int) -> Path:
    """Return the journal that each pass gets a copy of, because writing a long one takes longer than starting with it."""
    past = folder / f"past-{grows}-{size}"
    if not past.exists():
        past.mkdir()
        write_journal(past, size if grows == "waiters" else 0, size if grows == "ended leases" else 0)
    return past


def polls(effort: Effort) -> Curve:
    logging.getLogger("gpu_worker_pool").setLevel(logging.ERROR)  # a client warns of each server without leases
    with statistics_servers(max(effort.endpoints)) as (urls, _):

        def poll(size: int) -> float:
            every_s, rounds = effort.long_polls if size == len(urls) else effort.short_polls
            return asyncio.run(poll_round_s(urls[:size], every_s, rounds))

        asyncio.run(poll_round_s(urls[:1], 0.05, 1))  # everything is loaded once
        found = in_turn({str(size): partial(poll, size) for size in effort.endpoints}, effort.passes)
    return Curve("poll round of a client, processor time", "endpoints", _by_size(found))


def _by_size(found: dict[str, list[float]]) -> dict[int, list[float]]:
    return {int(size): costs for size, costs in found.items()}


def report(results: Results, curves: list[Curve]) -> None:
    curves = [curve for curve in curves if curve.costs_s]
    sizes = sorted({size for curve in curves for size in curve.costs_s})
    rows: list[list[Cell]] = []
    for curve in curves:
        medians_s = curve.medians_s
        cells = [duration(medians_s[size]) if size in medians_s else None for size in sizes]
        largest = max(medians_s)
        powers = [f"{last_exponent(medians_s):.2f}", f"{exponent(medians_s):.2f}"]
        rows.append(
            [
                f"{curve.what}: {curve.grows}",
                len(curve.costs_s[largest]),
                *cells,
                spread_s(curve.costs_s[largest]),
                *powers,
            ]
        )
    results.table(
        "What grows, by size: medians of the passes",
        [
            "",
            "passes",
            *(f"{size:,}" for size in sizes),
            "passes at the largest",
            "exponent of the last 10x step",
            "exponent over all sizes",
        ],
        rows,
        note="Exponent: 0 is flat, 1 is in proportion. The start of a server includes that of Python and loading the program. "
        "A decision: all kinds together, in a queue where each waiter that shares a GPU asks for its own number of MB. Over "
        f"HTTP, the waiters want all {GPUS_WAITED_FOR} GPUs: half of the GPUs are leased to the first waiter, and the other half "
        "is held for the next. The measured request is more urgent and takes one of the held GPUs.",
    )
    results.plot(
        "costs",
        "Costs by size, in steps of ten",
        kind="line",
        x="size",
        y="ms",
        log_x=True,
        log_y=True,
        series={
            f"{curve.what}: {curve.grows} ({last_exponent(curve.medians_s):.2f})": [
                (size, 1000 * cost_s) for size, cost_s in sorted(curve.medians_s.items())
            ]
            for curve in curves
        },
        note="In brackets: the exponent of the last 10x step.",
    )


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    results = Results("growth", "How costs grow with GPUs, waiters, endpoints and history.")
    with tempfile.TemporaryDirectory(prefix="growth-benchmark-") as name:
        curves = [*decisions(effort), *servers(effort, Path(name)), polls(effort)]
    report(results, curves)
    results.finish(options)


if __name__ == "__main__":
    main()
