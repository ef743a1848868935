"""Two servers for the example of tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest does not do it with --import-mode=importlib

from example_servers import ExampleServer, example_servers


@pytest.fixture
def servers() -> Iterator[list[ExampleServer]]:
    """Start two servers with one simulated GPU each."""
    with example_servers("1", "1") as started:
        yield started
