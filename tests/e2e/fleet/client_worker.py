"""A worker with the package's own client, which asks the whole fleet: request a GPU, lock its witness, release it, again.

    python -m tests.e2e.fleet.client_worker '{"name": "c1", "endpoints": ["http://127.0.0.1:8000", ...], ...}'

It writes the lines of worker.py (see tests/e2e/run_history.py), and ends at SIGTERM or with the process that started it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass

from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.errors import PoolError, StaleAssignmentError
from tests.e2e.worker import APPEND, now

PAUSE_S = 0.2


@dataclass(frozen=True)
class ClientOrders:
    """Without `rounds` it goes on until SIGTERM. The TTL is GPU_POOL_TTL, as for every client."""

    name: str
    endpoints: tuple[str, ...]
    folder: str
    ttl_s: float = 30.0
    shortest_hold_s: float = 0.0
    longest_hold_s: float = 0.0
    rounds: int | None = None
    seed: int = 0

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.e2e.fleet.client_worker", json.dumps(asdict(self))]


class ClientWorker:
    def __init__(self, orders: ClientOrders) -> None:
        self.orders = orders
        self.random = random.Random(f"{orders.seed}/{orders.name}")
        self.history = os.open(f"{orders.folder}/{orders.name}.history", APPEND, 0o600)
        self.is_over = asyncio.Event()
        self.lost: dict[str, asyncio.Event] = {}
        self.parent = os.getppid()
        self.turn = 0

    def say(self, what: str, **facts: object) -> None:
        line = {"what": what, "who": self.orders.name, "at": now(), **facts}
        os.write(self.history, json.dumps(line).encode() + b"\n")

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.is_over.set)
        rounds = 0
        async with GPUWorkerPoolClient(
            service_endpoints=self.orders.endpoints, scope="fleet", on_lost=self.on_lost
        ) as client:
            while not self.is_over.is_set() and os.getppid() == self.parent and rounds != self.orders.rounds:
                rounds += await self.one_round(client)
        self.say("exits", rounds=rounds)

    def on_lost(self, assignment: Assignment) -> None:
        self.lost.setdefault(assignment.worker_id, asyncio.Event()).set()

    async def one_round(self, client: GPUWorkerPoolClient) -> int:
        self.turn += 1
        key = f"{self.orders.name}.{self.turn}"
        wishes = {"gpus": 1, "memory_mb": None, "priority": 0, "ttl_s": self.orders.ttl_s}
        self.say("asks", lease=key, turn=self.turn, **wishes)
        request = asyncio.ensure_future(client.request_gpu())
        over = asyncio.ensure_future(self.is_over.wait())
        await asyncio.wait({request, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        request.cancel()  # nothing is left of one that has not been granted
        try:
            assignment = await request
        except asyncio.CancelledError:
            return 0
        except PoolError as error:
            self.say("failed", lease=key, call="request_gpu", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(PAUSE_S)
            return 0
        await self.hold(key, assignment)
        with suppress(StaleAssignmentError):
            await client.release_gpu(assignment)
        return 1

    async def hold(self, key: str, assignment: Assignment) -> None:
        lost = self.lost.setdefault(assignment.worker_id, asyncio.Event())
        uuids, facts = list(assignment.uuids), {"id": assignment.lease_id, "fence": assignment.fence}
        self.say("took", lease=key, uuids=uuids, gpu_ids=list(range(len(uuids))), **facts)
        witnesses = [self.take_witness(key, uuid) for uuid in uuids]
        hold_s = self.random.uniform(self.orders.shortest_hold_s, self.orders.longest_hold_s)
        waits = [asyncio.ensure_future(event.wait()) for event in (lost, self.is_over)]
        await asyncio.wait(waits, timeout=hold_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        left_at = now()
        for witness in witnesses:
            os.close(witness)
        self.say("left", lease=key, why="lost" if lost.is_set() else "done", left_at=left_at)

    def take_witness(self, key: str, uuid: str) -> int:
        descriptor = os.open(f"{self.orders.folder}/{uuid}.witness", APPEND, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.say("witness_busy", lease=key, uuid=uuid)
        else:
            self.say("witness", lease=key, uuid=uuid)
        return descriptor


async def main(orders: ClientOrders) -> None:
    await ClientWorker(orders).run()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(main(ClientOrders(**{**given, "endpoints": tuple(given["endpoints"])})))
