"""The two servers of these tests: how they are set, their addresses, and what is held there."""

from __future__ import annotations

from typing import Any

from gpu_worker_pool.testing import ServerProcess

# No test here lasts that long, so what is seen is not because of a poll.
NEVER_S = 3600.0
ENV = {"REFRESH_INTERVAL": "0.05", "GPU_POOL_DURABILITY": "normal"}

BOTH = "http://big.localhost:8000,http://small.localhost:8000"


def active(server: ServerProcess) -> list[dict[str, Any]]:
    return [lease for lease in server.json("/pool")["leases"] if lease["state"] == "active"]
