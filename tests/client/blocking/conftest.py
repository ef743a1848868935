"""A server for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.leasing import release_all
from tests.server.running import RunningServer


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with RunningServer({"REFRESH_INTERVAL": "0.05", "GPU_POOL_DURABILITY": "normal"}) as server:
        yield server


@pytest.fixture
def server(running: RunningServer) -> Iterator[RunningServer]:
    """Four GPUs."""
    yield running
    release_all(running)
