"""Many endpoints for a client: stand-ins with statistics, all in one process of their own, and real servers."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager
from pathlib import Path

from benchmarks.shared.children import Child, arguments, say, until_told_to_end
from benchmarks.shared.servers import START_S, pool_server
from gpu_worker_pool import GPUWorkerPoolClient
from tests.client.statistics_server import StatisticsServer, idle

GPUS_EACH = 8


@contextmanager
def statistics_servers(
    live: int, refusing: int = 0, hanging: int = 0, *, are_busy: bool = False
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the URLs of the live servers, and of the dead ones, of which those that hang come first.

    They are stand-ins: each answers with the same statistics and has no leases, and all of them share a process. Busy
    ones have no free GPU.
    """
    # Each takes a socket to listen and one for the connection, so the limit is raised as far as allowed.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with closing(Child("benchmarks.shared.fleet", (live, refusing, hanging, are_busy))) as child:
        lively, dead = child.receive(START_S)
        yield lively, dead


@contextmanager
def lease_servers(folder: Path, number: int) -> Iterator[list[str]]:
    """Yield the URLs of this many servers of ours, with leases and simulated GPUs, a process each."""
    with ExitStack() as stack:
        # One after the other: their start is not measured, and on few cores this takes as long as all at once.
        ports = [stack.enter_context(pool_server(folder / f"real-{one}", GPUS_EACH, "full")) for one in range(number)]
        yield [f"http://127.0.0.1:{port}" for port in ports]


async def _serve_all(live: int, refusing: int, hanging: int, *, are_busy: bool) -> None:
    gpus = idle(GPUS_EACH)
    if are_busy:
        gpus = [{**gpu, "memory_usage_percent": 99.0, "utilization_percent": 100} for gpu in gpus]
    async with AsyncExitStack() as stack:

        async def start(number: int, *, hangs: bool = False) -> list[StatisticsServer]:
            return [await stack.enter_async_context(StatisticsServer(gpus, hangs=hangs)) for _ in range(number)]

        lively, hung, gone = await start(live), await start(hanging, hangs=True), await start(refusing)
        for server in gone:
            await server.stop()
        say(([server.url for server in lively], [server.url for server in (*hung, *gone)]))
        await until_told_to_end()


async def poll_round_s(urls: list[str], poll_s: float, rounds: int) -> float:
    """Return the seconds of processor time that a client spends on polling all endpoints once."""
    async with GPUWorkerPoolClient(service_endpoints=urls, polling_interval=poll_s) as client:
        client.get_pool_status()  # from now on it polls
        await asyncio.sleep(2 * poll_s)
        began = time.process_time()
        await asyncio.sleep(rounds * poll_s)
        return (time.process_time() - began) / rounds


if __name__ == "__main__":
    *_numbers, _are_busy = arguments()
    asyncio.run(_serve_all(*_numbers, are_busy=_are_busy))
