"""A server with three GPUs for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.calls.leases.box import NODE
from tests.server.leasing import OFTEN, release_all


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    """Two A100 (indices 0 and 1) and a T4 (index 2)."""
    with ServerProcess(
        {"SIMULATED_GPUS": "2xA100-80GB,1xT4", "GPU_POOL_NODE": NODE, "GPU_POOL_RESERVE_AFTER": "0", **OFTEN}
    ) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    release_all(running)
