"""Two servers for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.client.fault_tools import as_at_first, running


@pytest.fixture(scope="module")
def two() -> Iterator[list[ServerProcess]]:
    with running(2, GPU_POOL_DURABILITY="normal") as servers:
        yield servers


@pytest.fixture
def servers(two: list[ServerProcess]) -> Iterator[list[ServerProcess]]:
    yield two
    as_at_first(two)
