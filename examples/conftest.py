"""Two servers for the example of tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest does not do it with --import-mode=importlib

from example_servers import example_servers

from gpu_worker_pool.testing import ServerProcess


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    """Two servers with one simulated GPU each."""
    with example_servers("1", "1") as started:
        yield started
