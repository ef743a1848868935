"""What has a port on this machine: a GPU server, or another program."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.client.http.transport import CallFailed, Transport
from gpu_worker_pool.host.addresses import is_every_address
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import read
from gpu_worker_pool.wire.service import Health

ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class PortHolder:
    """A GPU server of this pool that answers at `url`."""

    url: str
    node: str
    gpu_count: int
    source: str


def find_server(host: str, port: int, prefix: str = "") -> PortHolder | None:
    """The GPU server there; None where nothing answers, or something else does."""
    host = "localhost" if is_every_address(host) else host
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{prefix}"
    pool = read(PoolView, asyncio.run(_ask(url, "/pool")), clean=plain)
    if pool is not None and pool.server_id is not None:
        return PortHolder(url, pool.node or "unknown", len(pool.gpus), pool.source or "unknown")
    # A box that finds no leader, or that the leader refuses, shows no pool, but its health.
    health = read(Health, asyncio.run(_ask(url, "/health")), clean=plain)
    if health is None or health.fleet is None:
        return None
    return PortHolder(url, "a box that has no leader now", health.gpu_count, health.source)


async def _ask(url: str, path: str) -> object:
    """The JSON that is answered, also with an error; None where nothing can be read."""
    async with Transport(uses_sockets=False) as transport:
        try:
            return (await transport.call("GET", url, path, timeout_s=ANSWER_S)).data
        except CallFailed:
            return None
