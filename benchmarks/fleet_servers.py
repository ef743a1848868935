"""Servers with statistics, many of them, in a process of their own, so that what is measured is the client."""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_worker_pool import GPUWorkerPoolClient
from tests.client.statistics_server import StatisticsServer

GPUS_EACH = 8


@contextmanager
def statistics_servers(live: int, refusing: int = 0, hanging: int = 0) -> Iterator[tuple[list[str], list[str]]]:
    """The URLs of the live ones, and of the dead ones."""
    # Each takes a socket to listen and one for the connection; where they are too few, as many as are allowed.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(there, live, refusing, hanging), daemon=True
    )
    process.start()
    try:
        yield here.recv()
    finally:
        here.send(None)
        process.join()


def _serve(pipe: Connection, live: int, refusing: int, hanging: int) -> None:
    asyncio.run(_serve_all(pipe, live, refusing, hanging))


async def _serve_all(pipe: Connection, live: int, refusing: int, hanging: int) -> None:
    async with AsyncExitStack() as stack:

        async def start(number: int, gpus: int, *, hangs: bool = False) -> list[StatisticsServer]:
            return [await stack.enter_async_context(StatisticsServer(gpus, hangs=hangs)) for _ in range(number)]

        lively, hung, gone = await start(live, GPUS_EACH), await start(hanging, 1, hangs=True), await start(refusing, 1)
        for server in gone:
            await server.stop()
        pipe.send(([server.url for server in lively], [server.url for server in (*hung, *gone)]))
        await asyncio.to_thread(pipe.recv)


async def poll_round_s(urls: list[str], poll_s: float, rounds: int) -> float:
    """Seconds of processor time that a client spends on looking at all endpoints once."""
    async with GPUWorkerPoolClient(service_endpoints=urls, polling_interval=poll_s):
        await asyncio.sleep(2 * poll_s)
        began = time.process_time()
        await asyncio.sleep(rounds * poll_s)
        return (time.process_time() - began) / rounds
