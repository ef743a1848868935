"""The workers of the demo, each in a process of its own: ask for a GPU, hold it for a moment, give it back, again and again.

    python -m gpu_worker_pool.cli.demo.worker '[{"name": "w01", "reads": 5, "writes": 8, ...}, ...]'

loads the client once and forks a process for each: a dozen starts of Python would take longer than the demo. It ends when
all have ended; when it is killed, so are they.

A worker is told what to do through a pipe: `go 0.5` (hold your GPUs for half as long as usual), then `finish` (do not ask
again; end when your turn is over). When the pipe is closed the worker ends at once. What it does it writes to another one, a JSON object in one write, with the time on
CLOCK_BOOTTIME: when it asked, was told to wait, began to hold a GPU and stopped to. These lines know nothing of the
server; demo_check.py judges by them. While it holds a GPU it also keeps a lock on a file named after the GPU: the kernel's
word for that nobody else is on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# What a client loads when it is started, loaded here for all of them.
import aiohttp  # noqa: F401

from gpu_worker_pool.client.events import ClientEvent
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.errors import PoolError
from gpu_worker_pool.host.clock import boot_time

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG: Final = 1
# Longer than any demo: whoever waits this long is found in the record.
PATIENCE_S = 120.0
# Once the demo is to end nobody is held up for longer than this.
LAST_HOLD_S = 0.3


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker is to do, and the descriptors of its pipes. A cheat gives its GPU back half-way through each turn and
    goes on using it.
    """

    name: str
    endpoint: str
    folder: str
    reads: int
    writes: int
    seed: int = 0
    shortest_hold_s: float = 0.4
    longest_hold_s: float = 1.8
    longest_rest_s: float = 0.3
    is_cheat: bool = False


class Worker:
    """Takes turns until it is told to finish."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._random = random.Random(f"{orders.seed}/{orders.name}")  # noqa: S311 - no secret
        self._turn = 0
        self._pace = 1.0
        self._go = asyncio.Event()
        self._finish = asyncio.Event()

    async def run(self) -> None:
        """Until told to finish; PoolError where the pool cannot be used."""
        client = GPUWorkerPoolClient(
            self._orders.endpoint,
            polling_interval=5.0,
            endpoint_health_check_interval=0.25,  # the server is away for a second, not for a night
            on_event=self._hear,
        )
        self._say("ready", pid=os.getpid())
        await self._go.wait()
        async with client:
            await self._rest(0.5)
            while not self._finish.is_set():
                await self._take_turn(client)
                await self._rest(self._orders.longest_rest_s)
        self._say("done")

    def obey(self, words: bytes) -> None:
        """What came from the demo."""
        for word, *values in (line.split() for line in words.decode().splitlines()):
            if word == "go":
                self._pace = float(values[0])
            else:
                self._finish.set()
            self._go.set()

    async def _take_turn(self, client: GPUWorkerPoolClient) -> None:
        self._turn += 1
        self._say("asks")
        assignment = await client.request_gpu(PATIENCE_S, labels={"demo": self._orders.name})
        gpu, uuid, hold_s = assignment.gpu_ids[0], assignment.uuids[0], self._hold_s()
        with self._lock(gpu, uuid):
            facts = {"lease": assignment.lease_id, "fence": assignment.fence, "for_s": round(hold_s, 2)}
            self._say("begins", gpu=gpu, uuid=uuid, **facts)
            if self._orders.is_cheat:
                await self._hold(assignment, hold_s / 2)
                await client.release_gpu(assignment)
                await asyncio.sleep(hold_s / 2)
            else:
                await self._hold(assignment, hold_s)
            self._say("ends", gpu=gpu)
        if assignment.is_lost:
            self._say("lost", gpu=gpu, reason=getattr(assignment.lost, "reason", None))
        elif not self._orders.is_cheat:
            await client.release_gpu(assignment)

    async def _hold(self, assignment: Assignment, hold_s: float) -> None:
        """For this long; shorter once the demo is to end, and no longer than the lease is ours."""
        assert assignment.lost is not None  # noqa: S101 - the client sets it; for mypy
        lost = asyncio.ensure_future(assignment.lost.wait())
        finish = asyncio.ensure_future(self._finish.wait())
        try:
            await asyncio.wait([lost, finish], timeout=hold_s, return_when=asyncio.FIRST_COMPLETED)
            if finish.done() and not lost.done():
                await asyncio.wait([lost], timeout=min(hold_s, LAST_HOLD_S * self._pace))
        finally:
            lost.cancel()
            finish.cancel()

    def _hold_s(self) -> float:
        return self._pace * self._random.uniform(self._orders.shortest_hold_s, self._orders.longest_hold_s)

    async def _rest(self, longest_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._random.uniform(0.0, longest_s)):
                await self._finish.wait()

    @contextlib.contextmanager
    def _lock(self, gpu: int | str, uuid: str) -> Iterator[None]:
        """Have the GPU's file locked. Nobody waits for it: one that cannot be had at once is written down."""
        with Path(self._orders.folder, f"{uuid}.lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._say("busy", gpu=gpu)
            yield

    def _hear(self, event: ClientEvent) -> None:
        if event.kind == "waiting":
            self._say("queued", lease=event.lease_id, reason=event.detail)

    def _say(self, what: str, **facts: Any) -> None:
        say(self._orders, what, turn=self._turn, **facts)


def say(orders: Orders, what: str, **facts: Any) -> None:
    """One line in one write: it is all there or not at all, however the process ends."""
    line = {"what": what, "worker": orders.name, "at": boot_time(), **facts}
    with contextlib.suppress(BrokenPipeError):  # the demo is gone; so are we, soon
        os.write(orders.writes, json.dumps(line).encode() + b"\n")


async def work(orders: Orders) -> None:
    """Work as told."""
    worker = Worker(orders)
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - for mypy

    def hear() -> None:
        words = os.read(orders.reads, 1024)
        if words:
            worker.obey(words)
        else:
            loop.remove_reader(orders.reads)
            task.cancel()

    loop.add_reader(orders.reads, hear)
    try:
        await worker.run()
    except PoolError as error:
        say(orders, "failed", reason=str(error))


def die_with(parent: int) -> None:
    """Be killed when this parent is, even with -9; for a child, right after it was forked."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):  # Linux; elsewhere the end of the pipe has to do
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before we had said so
            os._exit(1)


def main(all_orders: Sequence[Orders]) -> int:
    """Fork them, and wait for their ends."""
    parent, pipes = os.getpid(), {end for orders in all_orders for end in (orders.reads, orders.writes)}
    die_with(os.getppid())
    for orders in all_orders:
        if os.fork() == 0:
            die_with(parent)
            # Whoever else had a worker's end of a pipe open, its end would not be noticed.
            for end in pipes - {orders.reads, orders.writes}:
                os.close(end)
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(work(orders))
            return 0
    for end in pipes:
        os.close(end)
    for _ in all_orders:
        os.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main([Orders(**given) for given in json.loads(sys.argv[1])]))
