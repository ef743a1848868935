"""What has a port on this machine: a GPU server, or another program."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.host.addresses import is_every_address
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import read
from gpu_worker_pool.wire.transport import CallFailed, Reply, Transport

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
    try:
        reply = asyncio.run(_ask(f"{url}/pool"))
    except CallFailed:
        return None
    pool = read(PoolView, reply.data, clean=plain)
    if pool is None or pool.server_id is None:
        return None
    return PortHolder(url, pool.node or "unknown", len(pool.gpus), pool.source or "unknown")


async def _ask(url: str) -> Reply:
    async with Transport(uses_sockets=False) as transport:
        return await transport.call("GET", url, timeout_s=ANSWER_S)
