"""What tests need beside a running server: calls on connections that are kept open, and ports where nobody listens."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from gpu_worker_pool.testing import Answer

ROOT = Path(__file__).parent.parent.parent
MODULE = (sys.executable, "-m", "gpu_worker_pool.gpu_server")

# Below those that systems hand out by themselves, and for each of the tests' processes others: where a test says that
# nobody listens, no other test must have got the port meanwhile.
LOWEST_PORT = 12_000
PORTS_EACH = 2_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = (LOWEST_PORT + _WORKER % 10 * PORTS_EACH + number % PORTS_EACH for number in count(os.getpid()))


def free_port() -> int:
    """Nobody listens there, and nobody else will."""
    for port in _ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("the ports never end")


def ask_over(
    connection: http.client.HTTPConnection,
    path: str,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: Any = None,
) -> Answer:
    """One call on a connection that is kept open."""
    sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, body=sent, headers=dict(headers or {}))
    return Answer.read(connection)
