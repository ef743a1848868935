"""Three servers for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.client.fault_tools import as_at_first, running


@pytest.fixture(scope="module")
def three() -> Iterator[list[ServerProcess]]:
    with running(3) as servers:
        yield servers


@pytest.fixture
def servers(three: list[ServerProcess]) -> Iterator[list[ServerProcess]]:
    yield three
    as_at_first(three)
