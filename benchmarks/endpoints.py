"""A client with a hundred endpoints: how long until it has a GPU, what looking at all of them costs, and its memory.

The servers are in a process of their own, so that what is measured is the client. All times stand beside the same with
the live endpoints only, taken in turn in one run.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from gpu_worker_pool import GPUWorkerPoolClient  # noqa: E402
from tests.client.statistics_server import StatisticsServer  # noqa: E402
from tests.server.running import RunningServer  # noqa: E402

LIVE, REFUSING, HANGING = 85, 10, 5
GPUS_EACH = 8
TIMES = 7
POLL_S = 0.5
ROUNDS = 10
CYCLES = 10_000


@contextmanager
def servers() -> Iterator[tuple[list[str], list[str]]]:
    """The URLs of the live ones, and of the dead ones."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        here.send(None)
        process.join()


def _serve(pipe: Connection) -> None:
    asyncio.run(_serve_all(pipe))


async def _serve_all(pipe: Connection) -> None:
    async with AsyncExitStack() as stack:
        live = [await stack.enter_async_context(StatisticsServer(GPUS_EACH)) for _ in range(LIVE)]
        hanging = [await stack.enter_async_context(StatisticsServer(1, hangs=True)) for _ in range(HANGING)]
        refusing = [await stack.enter_async_context(StatisticsServer(1)) for _ in range(REFUSING)]
        for server in refusing:
            await server.stop()
        pipe.send(([server.url for server in live], [server.url for server in (*hanging, *refusing)]))
        await asyncio.to_thread(pipe.recv)


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


async def poll_round(urls: list[str]) -> float:
    """Seconds of processor time that the client spends on looking at all endpoints once."""
    async with GPUWorkerPoolClient(service_endpoints=urls, polling_interval=POLL_S):
        await asyncio.sleep(2 * POLL_S)
        began = time.process_time()
        await asyncio.sleep(ROUNDS * POLL_S)
        return (time.process_time() - began) / ROUNDS


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def memory(urls: list[str]) -> list[float]:
    """MB after 0, a tenth, a half and all of the cycles."""
    async with GPUWorkerPoolClient(service_endpoints=urls) as client:
        found = [resident_mb()]
        for cycle in range(1, CYCLES + 1):
            await client.release_gpu(await client.request_gpu())
            if cycle in {CYCLES // 10, CYCLES // 2, CYCLES}:
                found.append(resident_mb())
        return found


def main() -> None:
    logging.getLogger("gpu_worker_pool").setLevel(logging.ERROR)  # each client warns of each server without leases
    with servers() as (live, dead):
        asyncio.run(first_gpu(live))  # everything is loaded once
        all_times, live_times = [], []
        for _ in range(TIMES):
            all_times.append(asyncio.run(first_gpu([*dead, *live])))
            live_times.append(asyncio.run(first_gpu(live)))
        all_poll, live_poll = asyncio.run(poll_round([*dead, *live])), asyncio.run(poll_round(live))
        print(
            f"{LIVE} live endpoints of {GPUS_EACH} GPUs; with {REFUSING} more that refuse and {HANGING} that hang, named first"
        )
        print(f"{'median of ' + str(TIMES):32}{'live only':>12}{'with the dead':>16}{'ratio':>8}")
        for name, index in (("start", 0), ("start and the first GPU", 1)):
            ours, theirs = (statistics.median(run[index] for run in runs) for runs in (all_times, live_times))
            print(f"{name:32}{1000 * theirs:9.0f} ms{1000 * ours:13.0f} ms{ours / theirs:8.2f}")
        worst = max(got for _, got in all_times)
        print(f"{'worst of them':32}{1000 * max(got for _, got in live_times):9.0f} ms{1000 * worst:13.0f} ms")
        print(
            f"{'poll round, processor time':32}{1000 * live_poll:9.1f} ms{1000 * all_poll:13.1f} ms{all_poll / live_poll:8.2f}"
        )
        own, one = asyncio.run(memory([*dead, *live])), asyncio.run(memory(live[:1]))
    with RunningServer({"SIMULATED_GPUS": "8", "GPU_POOL_DURABILITY": "normal"}) as server:
        leased = asyncio.run(memory([server.url]))
    print(f"{'memory, cycles of a GPU:':32}" + "".join(f"{n:>10,}" for n in (0, CYCLES // 10, CYCLES // 2, CYCLES)))
    for name, found in (
        ("  these endpoints", own),
        ("  one server without leases", one),
        ("  one server with leases", leased),
    ):
        print(f"{name:32}" + "".join(f"{mb:7.1f} MB" for mb in found))


if __name__ == "__main__":
    main()
