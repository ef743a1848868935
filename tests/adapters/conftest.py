"""A server with four GPUs for the tests of one file, named in the environment as a user names it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import OFTEN, release_all


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({**OFTEN, "SIMULATED_GPUS": "4", "GPU_POOL_DURABILITY": "normal"}) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.setenv("GPU_SERVICE_ENDPOINT", running.url)
    yield running
    release_all(running)
