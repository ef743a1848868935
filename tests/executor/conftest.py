"""A server for the tests of one file, and a gate for the tasks of one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool import GPUExecutor
from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import OFTEN, release_all

from .work import Gate

MakeExecutor = Callable[..., GPUExecutor]


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({**OFTEN, "SIMULATED_GPUS": "4", "GPU_POOL_DURABILITY": "normal"}) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    """Four GPUs. No executor has left a lease."""
    yield running
    left = [lease for lease in running.json("/leases")["leases"] if lease["state"] != "draining"]
    release_all(running)
    assert left == []


@pytest.fixture
def executor(server: ServerProcess) -> Iterator[MakeExecutor]:
    """Makes executors that are shut down at the end."""
    made: list[GPUExecutor] = []

    def make(max_workers: int | None = 1, **options: Any) -> GPUExecutor:
        made.append(GPUExecutor(max_workers, service_endpoint=server.url, **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown(cancel_futures=True)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path) as gate:
        yield gate
