"""Who has a port on this machine: a server of ours, or somebody else."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from gpu_worker_pool.host.addresses import is_every_address

ANSWER_S = 2.0
MOST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PortHolder:
    """A GPU server of this pool that answers at `url`."""

    url: str
    node: str
    gpu_count: int
    source: str


def find_server(host: str, port: int, prefix: str = "") -> PortHolder | None:
    """The GPU server there; None where nobody answers, or somebody who is none."""
    host = "localhost" if is_every_address(host) else host
    try:
        data = _ask(host, port, f"{prefix}/pool")
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or "server_id" not in data or not isinstance(data.get("gpus"), list):
        return None
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{prefix}"
    return PortHolder(url, str(data.get("node")), len(data["gpus"]), str(data.get("source")))


def _ask(host: str, port: int, path: str) -> Any:
    # Not by urllib: that would go through the proxy that the environment names.
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read(MOST_BYTES))
    finally:
        connection.close()
