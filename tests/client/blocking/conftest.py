"""A server for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import release_all


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({"REFRESH_INTERVAL": "0.05", "GPU_POOL_DURABILITY": "normal"}) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    """Four GPUs."""
    yield running
    release_all(running)
