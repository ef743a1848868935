"""A client with a hundred endpoints: the time until it has a GPU, the cost of polling all endpoints, and its memory; and
`gpu-pool run` with a box that does not answer.

Most of the endpoints are stand-ins: servers with statistics and without leases, all in one process of their own, so that
only the client is measured. Some are real servers of ours with leases, a process each. All times are compared with those
of the live endpoints only, measured in turn in one run.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.shared.fleet import GPUS_EACH, lease_servers, poll_round_s, statistics_servers
from benchmarks.shared.processes import resident_mb
from benchmarks.shared.results import Cell, Results, duration, parser
from benchmarks.shared.rounds import in_turn, median_ratio, spread_s
from benchmarks.shared.servers import ROOT
from benchmarks.shared.targets import bounded, ratio
from gpu_worker_pool import GPUWorkerPoolClient
from gpu_worker_pool.testing import ServerProcess

LIVE_ONLY, ALL = "live only", "live and dead"
STAND_INS, REAL, MIXED = "stand-ins", "real servers", "real servers and busy stand-ins"
WITH_SILENT = "and a silent one"
MOST_S, MOST_WITH_SILENT = 0.3, 1.2
RUN_LIMIT = "60s"
MEMORY_LIMIT_S = 60.0


@dataclass(frozen=True)
class Effort:
    live: int
    refusing: int
    hanging: int
    real: int
    rounds: int
    poll_s: float
    polls: int
    poll_rounds: int
    cycles: tuple[int, ...]
    runs: int


QUICK = Effort(live=5, refusing=2, hanging=1, real=1, rounds=1, poll_s=0.1, polls=1, poll_rounds=1, cycles=(), runs=1)
WHOLE = Effort(
    live=85,
    refusing=10,
    hanging=5,
    real=9,
    rounds=5,
    poll_s=0.5,
    polls=2,
    poll_rounds=2,
    cycles=(0, 200, 600, 1_200),
    runs=5,
)


@dataclass(frozen=True)
class First:
    """Seconds to the end of the start, and to the first GPU; and whether a server with leases granted it."""

    start_s: float
    gpu_s: float
    is_at_real: bool


async def first_gpu(urls: list[str]) -> First:
    client = GPUWorkerPoolClient(service_endpoints=urls)
    began = time.perf_counter()
    await client.start()
    start_s = time.perf_counter() - began
    assignment = await client.request_gpu()
    gpu_s = time.perf_counter() - began
    real = {info["endpoint_id"] for info in client.get_endpoints_info() or () if info["has_leases"]}
    await client.stop()
    return First(start_s, gpu_s, assignment.endpoint_id in real)


async def memory_mb(urls: list[str], marks: tuple[int, ...]) -> list[float]:
    """Return the memory of this process in MB, after each of these numbers of cycles."""
    found = []
    async with GPUWorkerPoolClient(service_endpoints=urls) as client:
        for cycle in range(marks[-1] + 1):
            if cycle:
                await client.release_gpu(await client.request_gpu())
            if cycle in marks:
                found.append(resident_mb(os.getpid()))
    return found


def memory_of_a_new_process_mb(urls: list[str], marks: tuple[int, ...]) -> list[float]:
    """Return the same for a new process: one that ran before may have free memory in which a leak does not show."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=be_quiet) as process:
        return process.submit(_run_memory, urls, marks).result(MEMORY_LIMIT_S)


def _run_memory(urls: list[str], marks: tuple[int, ...]) -> list[float]:
    return asyncio.run(memory_mb(urls, marks))


def be_quiet() -> None:
    """Silence the client, which warns of each server without leases and of each dead one."""
    logging.getLogger("gpu_worker_pool").setLevel(logging.ERROR)


def start_and_poll(results: Results, effort: Effort, fleets: dict[str, dict[str, list[str]]]) -> None:
    """Measure all fleets, each with and without its dead endpoints, in turn."""
    cases = {(fleet, which): urls for fleet, both in fleets.items() for which, urls in both.items()}
    starts: dict[str, list[float]] = {_name(*case): [] for case in cases}
    at_real: Counter[str] = Counter()

    def start(name: str, urls: list[str]) -> float:
        first = asyncio.run(first_gpu(urls))
        starts[name].append(first.start_s)
        at_real[name] += first.is_at_real
        return first.gpu_s

    def poll(urls: list[str]) -> float:
        return asyncio.run(poll_round_s(urls, effort.poll_s, effort.polls))

    firsts = in_turn({_name(*case): partial(start, _name(*case), urls) for case, urls in cases.items()}, effort.rounds)
    polls = in_turn(
        {_name(*case): partial(poll, urls) for case, urls in cases.items() if case[0] == STAND_INS}, effort.poll_rounds
    )
    assert at_real[_name(MIXED, ALL)] == effort.rounds, "the first GPU came from a stand-in"
    rows: list[list[Cell]] = []
    for fleet, both in fleets.items():
        live, everybody = _name(fleet, LIVE_ONLY), _name(fleet, ALL)
        measured = {"start": starts, "start and the first GPU": firsts}
        if fleet == STAND_INS:
            measured["poll round, processor time"] = polls
        for what, found in measured.items():
            rows.append(
                [
                    f"{fleet}: {what}",
                    f"{len(both[LIVE_ONLY])} + {len(both[ALL]) - len(both[LIVE_ONLY])}",
                    duration(statistics.median(found[live])),
                    spread_s(found[live]),
                    duration(statistics.median(found[everybody])),
                    spread_s(found[everybody]),
                    f"{median_ratio(found[everybody], found[live]):.2f} x",
                ]
            )
    results.table(
        f"Endpoints of {GPUS_EACH} GPUs each; dead ones are listed first: medians of alternating rounds",
        ["", "live + dead", LIVE_ONLY, "rounds", ALL, "rounds", "ratio"],
        rows,
        note=f"Real servers: {effort.real} of ours, a process each, with leases and simulated GPUs. Stand-ins: servers with "
        "statistics and without leases, all in one process. With real servers alone, the one dead endpoint hangs; "
        f"otherwise {effort.refusing} refuse connections and {effort.hanging} hang. Busy: all GPUs of the stand-ins are in use, "
        "so that the first GPU is leased from a real server.",
    )
    dead = effort.refusing + effort.hanging
    mixed_s, stand_ins_s, real_s = (statistics.median(firsts[_name(fleet, ALL)]) for fleet in (MIXED, STAND_INS, REAL))
    bounded(
        results,
        "endpoints_first_gpu",
        f"a client with {len(fleets[MIXED][ALL])} endpoints, {dead} of them dead: time to start and to get the first GPU, leased "
        f"from one of {effort.real} real servers; the other {effort.live - effort.real} live ones are stand-ins in one process, with "
        "statistics and without leases",
        mixed_s,
        "s",
        most=MOST_S,
        spread=f"rounds: {spread_s(firsts[_name(MIXED, ALL)])}; {effort.live} idle stand-ins with {dead} dead: "
        f"{duration(stand_ins_s)}; {effort.real} real servers with one dead: {duration(real_s)}",
        why=f"not known; probably polling that many endpoints takes one core most of that time: without the dead ones it is "
        f"{duration(statistics.median(firsts[_name(MIXED, LIVE_ONLY)]))}",
    )


def run_with_a_silent_box(results: Results, effort: Effort, boxes: list[str]) -> None:
    """Measure a command that needs a GPU, with and without a box that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        cases = {LIVE_ONLY: boxes, WITH_SILENT: [silent_url, *boxes]}
        found = in_turn({name: partial(run_s, urls) for name, urls in cases.items()}, effort.runs)
    number = len(boxes)
    results.table(
        f"`gpu-pool run -- true`, in a process of its own: medians of {effort.runs} alternating rounds",
        ["", "median", "rounds"],
        [
            [f"{number} boxes, {name}", duration(statistics.median(times)), spread_s(times)]
            for name, times in found.items()
        ],
        note="The silent box is listed first. It accepts connections and never answers.",
    )
    ratio(
        results,
        "run_with_silent_box",
        f"`gpu-pool run` with one silent box of {number + 1}, relative to without it",
        found[WITH_SILENT],
        found[LIVE_ONLY],
        most=MOST_WITH_SILENT,
        spread=f"medians: {duration(statistics.median(found[WITH_SILENT]))} and {duration(statistics.median(found[LIVE_ONLY]))}",
        why="not known; probably the command still waits a moment for the others once a box has answered, when it looks for boxes "
        "and when it requests the GPU",
    )


def run_s(urls: list[str]) -> float:
    """Return the seconds that a command takes which needs a GPU and does nothing."""
    options = ["-q", "--timeout", RUN_LIMIT, "--endpoint", ",".join(urls)]
    command = [sys.executable, "-m", "gpu_worker_pool", "run", *options, "--", "true"]
    began = time.perf_counter()
    with ServerProcess.popen(command, cwd=ROOT, stdin=subprocess.DEVNULL) as process:
        # Without a limit here: with one, it would look every 50 ms whether the command has ended.
        assert process.wait() == 0
    return time.perf_counter() - began


def show_memory(results: Results, effort: Effort, real: list[str], stand_ins: list[str], dead: list[str]) -> None:
    memory = {
        "one real server": memory_of_a_new_process_mb(real[:1], effort.cycles),
        "one stand-in": memory_of_a_new_process_mb(stand_ins[:1], effort.cycles),
        "stand-ins and dead endpoints": memory_of_a_new_process_mb([*dead, *stand_ins], effort.cycles[:-1]),
    }
    results.table(
        "Memory of the client's process in MB, after a number of cycles of request + release",
        ["", *(f"{cycles:,}" for cycles in effort.cycles)],
        [[name, *found, *[None] * (len(effort.cycles) - len(found))] for name, found in memory.items()],
        note="Each row is a new process. A client remembers its last cycles, and the last ones at each stand-in. It grows until "
        "it has as many as it keeps. With many endpoints, that takes more cycles than these.",
    )


def _name(fleet: str, which: str) -> str:
    return f"{fleet}, {which}"


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    be_quiet()
    results = Results("endpoints", "A client with a hundred endpoints, some of them dead.")
    with (
        tempfile.TemporaryDirectory(prefix="endpoints-benchmark-") as name,
        lease_servers(Path(name), effort.real) as real,
        statistics_servers(effort.live, effort.refusing, effort.hanging) as (stand_ins, dead),
        statistics_servers(effort.live - effort.real, are_busy=True) as (busy, _),
    ):
        mixed = [*busy, *real]
        hanging = dead[:1]
        asyncio.run(first_gpu([*stand_ins, *real]))  # everything is loaded once
        fleets = {
            STAND_INS: {LIVE_ONLY: stand_ins, ALL: [*dead, *stand_ins]},
            REAL: {LIVE_ONLY: real, ALL: [*hanging, *real]},
            MIXED: {LIVE_ONLY: mixed, ALL: [*dead, *mixed]},
        }
        start_and_poll(results, effort, fleets)
        run_with_a_silent_box(results, effort, real[:2])
        if effort.cycles:
            show_memory(results, effort, real, stand_ins, dead)
    results.finish(options)


if __name__ == "__main__":
    main()
