"""Two servers for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.fault_tools import as_at_first, running
from tests.server.running import RunningServer


@pytest.fixture(scope="module")
def two() -> Iterator[list[RunningServer]]:
    with running(2, GPU_POOL_DURABILITY="normal") as servers:
        yield servers


@pytest.fixture
def servers(two: list[RunningServer]) -> Iterator[list[RunningServer]]:
    yield two
    as_at_first(two)
