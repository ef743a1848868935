"""What a fleet of a thousand boxes costs its leader, with a thousand clients that wait, and how fast GPUs change hands.

The leader is a real server on a real PostgreSQL that syncs each commit. The boxes are in one process, each with a connection of its own:
they speak the protocol of agents, and report every second that nothing has changed. The clients are in this process, each with a
connection of its own. Each lease takes all 8 GPUs of a box. A hand-over is the time from before a release until the next client is told.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import Figure, Results, percentile
from benchmarks.fleet.clients import Waiters, take_all
from benchmarks.fleet.many_boxes import LIMIT_S, ManyBoxes
from benchmarks.processes import cpu_s, pool_server, wait_until
from gpu_worker_pool.testing import ServerProcess
from tests.ledger.postgres.server import PostgresServer

KEY = "the key of a benchmark"
MANY = "100000"
SETTINGS = {
    "GPU_POOL_NODE": "leader",
    "GPU_POOL_FLEET_KEY": KEY,
    "GPU_POOL_MAX_QUEUED": MANY,
    "GPU_POOL_MAX_QUEUED_PER_OWNER": MANY,
    "GPU_POOL_MAX_LEASES_PER_OWNER": MANY,
    "GPU_POOL_MAX_WAITING": MANY,
}


@dataclass(frozen=True)
class Effort:
    boxes: int
    waiters: int
    idle_s: float
    hand_overs: int
    every_s: float = 0.05


QUICK = Effort(boxes=5, waiters=50, idle_s=0.2, hand_overs=5)
WHOLE = Effort(boxes=1_000, waiters=1_000, idle_s=3.0, hand_overs=200)


@dataclass
class Phases:
    """The share of a core that the leader used in each phase."""

    leader: ServerProcess
    cores: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began, began_cpu = time.monotonic(), cpu_s(self.leader.pid)
        yield
        self.cores[name] = (cpu_s(self.leader.pid) - began_cpu) / (time.monotonic() - began)


async def with_clients(phases: Phases, effort: Effort) -> list[float]:
    """Take all GPUs, let clients wait, and hand GPUs over; return how long each hand-over took."""
    port = phases.leader.port
    with phases.phase("all GPUs are taken"):
        held = await take_all(port, effort.boxes)
    waiters = Waiters(port)
    with phases.phase("clients come to wait"):
        await waiters.start(effort.waiters)
    with phases.phase("all clients wait"):
        await asyncio.sleep(effort.idle_s)
    gc.collect()
    gc.disable()
    with phases.phase("hand-overs"):
        times_s = await waiters.hand_overs_s(held, list(held)[: effort.hand_overs], effort.every_s)
    gc.enable()
    await waiters.close()
    return times_s


def is_leader(box: ServerProcess) -> bool:
    return (box.json("/health").get("fleet") or {}).get("role") == "leader"


def measure(results: Results, *, is_quick: bool) -> None:
    """Add the figures of a fleet of a thousand boxes."""
    effort = QUICK if is_quick else WHOLE
    # Each client has a connection.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    database = PostgresServer(is_durable=True)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            pool_server(Path(folder), "1xT4", "full", {**SETTINGS, "GPU_POOL_FLEET": database.url()}) as leader,
        ):
            wait_until(lambda: is_leader(leader), "the server leads")
            phases = Phases(leader)
            with ManyBoxes(effort.boxes, leader.url, KEY) as boxes:
                with phases.phase("all boxes join"):
                    boxes.hear(LIMIT_S)
                times_s = asyncio.run(with_clients(phases, effort))
                losses = boxes.losses()
    finally:
        database.remove()
    shares = ", ".join(f"{name} {share:.2f}" for name, share in phases.cores.items())
    cores = list(phases.cores.values())
    results.add(
        "leader_cores",
        Figure(
            max(cores),
            "cores",
            min(cores),
            max(cores),
            len(cores),
            note=f"{shares}; a box lost its leader {losses} times",
        ),
    )
    results.add("leader_hand_over", Figure(percentile(times_s, 99), "s", min(times_s), max(times_s), len(times_s)))
