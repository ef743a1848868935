"""What the tests of the client under faults need again and again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gpu_worker_pool import testing
from gpu_worker_pool.client import GPUWorkerPoolClient
from gpu_worker_pool.testing import ServerProcess
from tests.server import elsewhere
from tests.server.leasing import new_id, pause_s, release_all, take

T = TypeVar("T")
SOON_S = 20.0
# Quick to look, quick to give up: the tests wait for all of it.
QUICK: dict[str, Any] = {
    "polling_interval": 0.1,
    "endpoint_timeout": 0.5,
    "endpoint_max_retries": 1,
    "endpoint_health_check_interval": 0.2,
}


def client_of(*endpoints: Any, **options: Any) -> GPUWorkerPoolClient:
    """A client of these servers, whatever they are: all have a `url`."""
    return GPUWorkerPoolClient(service_endpoints=[endpoint.url for endpoint in endpoints], **{**QUICK, **options})


def id_of(endpoint: Any) -> str:
    """What a client of several calls it."""
    return f"127.0.0.1-{endpoint.port}"


async def soon(look: Callable[[], T | None], what: str, within_s: float = SOON_S) -> T:
    """What `look` sees as soon as it is something; the loop goes on meanwhile."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        seen = look()
        if seen:
            return seen
        waited_s = loop.time() - began
        assert waited_s < within_s, f"not within {within_s:g} s: {what}; seen at last: {seen!r}"
        await asyncio.sleep(pause_s(waited_s))


def lease_ids(*servers: ServerProcess) -> set[str]:
    """All who hold or wait at these servers."""
    return {lease["id"] for server in servers for lease in server.json("/leases")["leases"]}


async def nothing_left(*servers: ServerProcess, within_s: float = SOON_S) -> None:
    """Neither a lease nor a place in a queue."""
    await soon(lambda: not lease_ids(*servers), f"no leases at the servers {lease_ids(*servers)}", within_s)


async def healthy(client: GPUWorkerPoolClient, *endpoints: Any, within_s: float = SOON_S) -> None:
    wanted = {id_of(endpoint) for endpoint in endpoints}
    await soon(
        lambda: set(client.get_error_recovery_status()["healthy_endpoints"]) == wanted,
        f"{wanted} are the healthy ones; {client.get_error_recovery_status()['errors']}",
        within_s,
    )


def breaker(client: GPUWorkerPoolClient, endpoint: Any) -> str:
    stats: str = client.get_error_recovery_status()["circuit_breaker_stats"][id_of(endpoint)]["state"]
    return stats


@contextmanager
def running(number: int, *, is_elsewhere: bool = False, **env: str) -> Iterator[list[ServerProcess]]:
    """This number of servers, started side by side. With `is_elsewhere` their holders are on another machine."""
    command = elsewhere.COMMAND if is_elsewhere else testing.COMMAND
    settings = {"SIMULATED_GPUS": "2", "REFRESH_INTERVAL": "0.05", **env}
    servers = [ServerProcess({"GPU_POOL_NODE": f"box{place}", **settings}, command=command) for place in range(number)]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        with ThreadPoolExecutor(number) as starters:
            list(starters.map(lambda server: server.start(), servers))
        yield servers


def as_at_first(servers: list[ServerProcess]) -> None:
    """For the next test: all run, and nobody holds or waits."""
    with ThreadPoolExecutor(len(servers)) as menders:
        list(menders.map(_mend, servers))


def _mend(server: ServerProcess) -> None:
    if server.process is None or server.process.poll() is not None:
        server.start()
    os.kill(server.pid, signal.SIGCONT)
    release_all(server)


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """It does not run in here, and its connections stay open."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def occupy(*servers: ServerProcess, gpus: int = 2) -> list[str]:
    """Take all GPUs of these servers by somebody else, for a long time; the leases, one per server."""
    return [take(server, new_id("other"), gpus=gpus, ttl_s=600)["id"] for server in servers]


def sockets() -> set[str]:
    """The sockets that this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name = str(entry.readlink())
        except OSError:
            continue  # the one that the folder was read by
        if name.startswith("socket:"):
            found.add(name)
    return found


def other_tasks() -> set[asyncio.Task[Any]]:
    """All tasks of this loop but the one that asks."""
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


class Leftovers:
    """What there was before, to be compared with what there is after."""

    def __init__(self) -> None:
        self.sockets = sockets()
        self.tasks = other_tasks()

    def tasks_left(self) -> set[asyncio.Task[Any]]:
        return other_tasks() - self.tasks

    async def none(self, *servers: ServerProcess) -> None:
        """No task, at once; no socket and no lease, soon."""
        assert not self.tasks_left()
        await soon(lambda: not sockets() - self.sockets, "all sockets are closed", 15)
        await nothing_left(*servers)
