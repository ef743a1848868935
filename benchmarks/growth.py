"""How costs grow with GPUs, waiters, endpoints and history, in steps of ten, and with which exponent.

A decision is measured in the core. The start is that of a server with a journal of that size. All these servers run side
by side, and a client leases and releases at one after the other. A poll round is that of a client with that many
endpoints. Every other pass over the sizes goes backwards. There are two exponents: that of the last step of ten, because most costs are a constant plus a part that
grows, and the slope of the least-squares line through the logarithms of all sizes. 0 is flat, 1 is in proportion.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.leases.locks import PoolLease, cycle_s, who_asks
from benchmarks.shared.crowded_pool import CrowdedPool
from benchmarks.shared.fit import exponent, last_exponent
from benchmarks.shared.fleet import poll_round_s, statistics_servers
from benchmarks.shared.large_server import LARGE, SPEC
from benchmarks.shared.past_journal import FEWEST_GPUS, NODE, write_journal
from benchmarks.shared.processes import Busy, loop_s
from benchmarks.shared.results import Cell, Results, duration, parser, show
from benchmarks.shared.rounds import in_turn, spread, spread_s
from benchmarks.shared.servers import pool
from benchmarks.shared.targets import bounded, ratio
from gpu_worker_pool.testing import ServerProcess

SEED = 1
FEW = 100
GPUS, WAITERS, ENDED = "GPUs", "waiters", "ended leases"
# A reading of ten thousand simulated GPUs takes longer than a second, and the simulation most of that.
GPUS_READ_RARELY, RARELY_S = "GPUs, read once a minute", 60
MOST_EXPONENT = 0.25
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
    many_gpus: tuple[int, ...]
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
    server_gpus=(100,),
    many_gpus=(100, 200),
    waiters=(100,),
    ended=(),
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
    server_gpus=(100, 1_000),
    many_gpus=(100, 1_000, 10_000),
    waiters=(100, 1_000, 10_000),
    ended=(1_000, 100_000),
    leases=10,
    endpoints=(10, 100, 1_000),
    short_polls=(0.15, 4),
    long_polls=(1.3, 1),
    passes=3,
    server_passes=15,
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
    for crowded in pools.values():
        crowded.fill()
        crowded.use(TURNOVER)
        crowded.let_share()
    gc.collect()

    def mean_s(crowded: CrowdedPool) -> float:
        taken: dict[str, list[float]] = defaultdict(list)
        for _ in range(effort.decisions):
            crowded.round(taken)
        return statistics.fmean(chain.from_iterable(taken.values()))

    found = in_turn({str(size): partial(mean_s, crowded) for size, crowded in pools.items()}, effort.passes)
    return Curve(
        f"a decision, processor time, {FEW} {'waiters' if grows == 'GPUs' else 'GPUs'}", grows, _by_size(found)
    )


def servers(effort: Effort, folder: Path, results: Results) -> list[Curve]:
    """Start a server for each size, and measure that. Then let a client lease and release at all of them in turn."""
    # Those with many GPUs come first, so that they have read all before they are measured.
    kinds = {GPUS_READ_RARELY: effort.many_gpus, GPUS: effort.server_gpus, WAITERS: effort.waiters, ENDED: effort.ended}
    cases = [*((grows, size) for grows, sizes in kinds.items() for size in sizes), (GPUS, FEWEST_GPUS)]
    starts = {grows: Curve("start of a server", grows) for grows in kinds}
    form = {**who_asks(), "model": "T4", "priority": PRIORITY}
    with ExitStack() as stack:
        ports: dict[str, int] = {}
        busy: dict[str, Busy] = {}
        loops: dict[str, Busy] = {}
        for grows, size in cases:
            state = folder / f"server-{_name(grows, size)}"
            write_past(state, grows, size)
            began = time.perf_counter()
            server = stack.enter_context(server_of(state, grows, size))
            starts[grows].costs_s[size].append(time.perf_counter() - began)
            name = _name(grows, size)
            ports[name], busy[name], loops[name] = server.port, Busy(server.pid), Busy(server.pid, loop_s)

        def lease(name: str) -> float:
            # A connection of its own: a server ends one that was idle for some seconds.
            with closing(PoolLease(ports[name], form)) as lock:
                cycles = partial(cycle_s, lock, effort.leases)
                return busy[name].during(lambda: loops[name].during(cycles, effort.leases), effort.leases)

        found = in_turn({name: partial(lease, name) for name in ports}, effort.server_passes)
    cpu_s, of_loop_s = ({name: one.cycle_s() for name, one in used.items()} for used in (busy, loops))
    report_leases(results, found, cpu_s, kinds)
    for figure_id, grows, sizes in (
        ("lease_growth_gpus", GPUS_READ_RARELY, effort.many_gpus),
        ("lease_growth_waiters", WAITERS, effort.waiters),
    ):
        names = {size: _name(grows, size) for size in sizes}
        times = {
            what: {size: of_all[name] for size, name in names.items()}
            for what, of_all in (("of the event loop", of_loop_s), ("of the server", cpu_s))
        }
        lease_growth(results, figure_id, grows, {size: found[name] for size, name in names.items()}, times)
    grants = []
    for grows, sizes in kinds.items():
        all_sizes = (FEWEST_GPUS, *sizes) if grows == GPUS else sizes
        grants.append(
            Curve("lease + release over HTTP", grows, {size: found[_name(grows, size)] for size in all_sizes})
        )
    return [curve for pair in zip(starts.values(), grants, strict=True) for curve in pair]


def report_leases(
    results: Results, found: dict[str, list[float]], cpu_s: dict[str, float], kinds: dict[str, tuple[int, ...]]
) -> None:
    """Compare lease + release at the largest size with a server of few GPUs and no waiters, and judge the growth."""
    none = found[_name(GPUS, FEWEST_GPUS)]
    for figure_id, grows, case, most, why in (
        (
            "lease_1000_gpus",
            GPUS,
            "",
            1.5,
            "its passes and its readings of all GPUs, once a second, grow with the GPUs",
        ),
        (
            "lease_10000_waiters",
            WAITERS,
            " that cannot be served, by a more urgent request",
            2.0,
            "a pass goes through the kinds of wishes in the queue; see the decisions",
        ),
    ):
        largest = max(kinds[grows])
        ours = found[_name(grows, largest)]
        ratio(
            results,
            figure_id,
            f"lease + release over HTTP, normal, with {largest:,} {grows}{case}, relative to {FEWEST_GPUS} GPUs and no waiters",
            ours,
            none,
            most=most,
            spread=f"medians: {duration(statistics.median(ours))} and {duration(statistics.median(none))}; by the processor time of the "
            f"server: {show(cpu_s[_name(grows, largest)] / cpu_s[_name(GPUS, FEWEST_GPUS)])} x",
            why=why,
        )


def lease_growth(
    results: Results,
    figure_id: str,
    grows: str,
    by_size: dict[int, list[float]],
    processor_s: dict[str, dict[int, float]],
) -> None:
    """Judge the growth of a lease + release with the GPUs or the waiters, by the fit or by the last step."""
    has_growth = len(by_size) > 1
    rounds = (
        [dict(zip(by_size, costs, strict=True)) for costs in zip(*by_size.values(), strict=True)] if has_growth else []
    )
    by_round = [exponent(costs) for costs in rounds]
    fit, last = (statistics.median(map(of, rounds)) if rounds else 0.0 for of in (exponent, last_exponent))
    medians = ", ".join(duration(statistics.median(costs)) for costs in by_size.values())
    by_cpu = [f"{show(exponent(costs))} {what}" for what, costs in processor_s.items() if has_growth]
    bounded(
        results,
        figure_id,
        f"growth of a lease + release over HTTP from {min(by_size):,} to {max(by_size):,} {grows}, by the fit or by the last "
        "step: the greater exponent",
        max(fit, last) if has_growth else None,
        "",
        most=MOST_EXPONENT,
        spread=f"fit {show(fit)}, rounds: {spread(by_round)}; last step {show(last)}; medians: {medians}; by processor time: {', '.join(by_cpu)}"
        if has_growth
        else "",
        why="a pass goes through the kinds of wishes in the queue; see the decisions"
        if has_growth
        else "one size only",
    )


def server_of(state: Path, grows: str, size: int) -> ServerProcess:
    """Return the server of a case. It starts when it is entered."""
    env = {**ROOMY, "GPU_POOL_STATE_DIR": str(state)}
    if grows == GPUS_READ_RARELY:
        env |= {SPEC: f"{size}xT4", "REFRESH_INTERVAL": str(RARELY_S)}
        return pool(state / "log", "", "normal", env, LARGE)
    return pool(state / "log", f"{size if grows == GPUS else FEWEST_GPUS}xT4", "normal", env)


def _name(grows: str, size: int) -> str:
    return f"{size} {grows}"


def write_past(folder: Path, grows: str, size: int) -> None:
    """Write the journal that a server of this case starts with."""
    folder.mkdir()
    write_journal(folder, size if grows == WAITERS else 0, size if grows == ENDED else 0)


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
    curves = [curve for curve in curves if len(curve.costs_s) > 1]
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
        "What grows, by size: medians of the passes, of which the start of a server has one",
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
        f"HTTP, the waiters want all {FEWEST_GPUS} GPUs: half of the GPUs are leased to the first waiter, and the other half "
        "is held for the next. The measured request is more urgent and takes one of the held GPUs. "
        "A server that reads its GPUs once a minute may have more of them than a box may have. It also reads all of them after a release.",
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
        curves = [*decisions(effort), *servers(effort, Path(name), results), polls(effort)]
    report(results, curves)
    results.finish(options)


if __name__ == "__main__":
    main()
