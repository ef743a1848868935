"""A client with a hundred endpoints: how long until it has a GPU, what looking at all of them costs, and its memory.

The servers are in a process of their own, so that what is measured is the client. All times stand beside the same with
the live endpoints only, taken in turn in one run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fleet_servers import GPUS_EACH, poll_round_s, statistics_servers
from lease_servers import pool_server, resident_mb
from results import Cell, Results, duration, parser
from rounds import in_turn, median_ratio, spread_s

from gpu_worker_pool import GPUWorkerPoolClient

LIVE_ONLY, ALL = "live only", "with the dead"
MOST_S = 1.0


@dataclass(frozen=True)
class Effort:
    live: int
    refusing: int
    hanging: int
    rounds: int
    poll_s: float
    polls: int
    poll_rounds: int
    cycles: int


QUICK = Effort(live=5, refusing=2, hanging=1, rounds=2, poll_s=0.1, polls=2, poll_rounds=1, cycles=20)
WHOLE = Effort(live=85, refusing=10, hanging=5, rounds=7, poll_s=0.5, polls=4, poll_rounds=2, cycles=600)


async def first_gpu(urls: list[str]) -> tuple[float, float]:
    """Seconds to the end of the start, and to the first GPU."""
    client = GPUWorkerPoolClient(service_endpoints=urls)
    began = time.perf_counter()
    await client.start()
    started = time.perf_counter() - began
    await client.request_gpu()
    got = time.perf_counter() - began
    await client.stop()
    return started, got


async def memory_mb(urls: list[str], cycles: int) -> list[float]:
    """MB after 0, a tenth, a half and all of the cycles."""
    async with GPUWorkerPoolClient(service_endpoints=urls) as client:
        found = [resident_mb(os.getpid())]
        for cycle in range(1, cycles + 1):
            await client.release_gpu(await client.request_gpu())
            if cycle in {cycles // 10, cycles // 2, cycles}:
                found.append(resident_mb(os.getpid()))
        return found


def start_and_poll(results: Results, effort: Effort, urls: dict[str, list[str]]) -> None:
    starts: dict[str, list[float]] = {name: [] for name in urls}

    def start(name: str) -> float:
        started, got = asyncio.run(first_gpu(urls[name]))
        starts[name].append(started)
        return got

    def poll(name: str) -> float:
        return asyncio.run(poll_round_s(urls[name], effort.poll_s, effort.polls))

    firsts = in_turn({name: partial(start, name) for name in urls}, effort.rounds)
    polls = in_turn({name: partial(poll, name) for name in urls}, effort.poll_rounds)
    rows: list[list[Cell]] = []
    for what, found in (("start", starts), ("start and the first GPU", firsts), ("poll round, processor time", polls)):
        cells = ((duration(statistics.median(found[name])), spread_s(found[name])) for name in urls)
        ratio = median_ratio(found[ALL], found[LIVE_ONLY])
        rows.append([what, *(cell for pair in cells for cell in pair), f"{ratio:.2f} x"])
    results.table(
        f"{effort.live} live endpoints of {GPUS_EACH} GPUs; with {effort.refusing} more that refuse and "
        f"{effort.hanging} that hang, named first: medians of rounds in turn",
        ["", LIVE_ONLY, "rounds", ALL, "rounds", "ratio"],
        rows,
    )
    first_s = statistics.median(firsts[ALL])
    results.figure(
        "endpoints_first_gpu",
        f"a client with {len(urls[ALL])} endpoints, {effort.refusing + effort.hanging} of them dead: start, and time to "
        "the first GPU",
        value=first_s,
        unit="s",
        target=f"<= {MOST_S:g} s",
        is_met=first_s <= MOST_S,
        spread=f"rounds: {spread_s(firsts[ALL])}",
        why="a look at that many endpoints takes one core as long: see the same with the live ones only",
    )


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    logging.getLogger("gpu_worker_pool").setLevel(logging.ERROR)  # each client warns of each server without leases
    results = Results("endpoints", "A client with a hundred endpoints, some of them dead.")
    memory: dict[str, list[float]] = {}
    with statistics_servers(effort.live, effort.refusing, effort.hanging) as (live, dead):
        asyncio.run(first_gpu(live))  # everything is loaded once
        start_and_poll(results, effort, {LIVE_ONLY: live, ALL: [*dead, *live]})
        memory["these endpoints"] = asyncio.run(memory_mb([*dead, *live], effort.cycles))
        memory["one server without leases"] = asyncio.run(memory_mb(live[:1], effort.cycles))
    with (
        tempfile.TemporaryDirectory(prefix="endpoints-benchmark-") as name,
        pool_server(Path(name) / "server", 8, "normal") as port,
    ):
        memory["one server with leases"] = asyncio.run(memory_mb([f"http://127.0.0.1:{port}"], effort.cycles))
    results.table(
        "Memory of the process, MB, after so many cycles of a GPU",
        ["", *(f"{cycles:,}" for cycles in (0, effort.cycles // 10, effort.cycles // 2, effort.cycles))],
        [[name, *found] for name, found in memory.items()],
        note="One process for all three, one after the other.",
    )
    results.finish(options)


if __name__ == "__main__":
    main()
