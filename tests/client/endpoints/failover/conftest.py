"""Three servers for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.fault_tools import as_at_first, running
from tests.server.running import RunningServer


@pytest.fixture(scope="module")
def three() -> Iterator[list[RunningServer]]:
    with running(3) as servers:
        yield servers


@pytest.fixture
def servers(three: list[RunningServer]) -> Iterator[list[RunningServer]]:
    yield three
    as_at_first(three)
