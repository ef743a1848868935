"""A big and a small server for the tests of one file."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.client.api.two_servers import ENV
from tests.server.leasing import release_all


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[ServerProcess, ServerProcess]]:
    big, small = (
        ServerProcess({**ENV, "SIMULATED_GPUS": "2xA100-80GB,1xT4"}),
        ServerProcess({**ENV, "SIMULATED_GPUS": "2"}),
    )
    with big, small:
        yield big, small


@pytest.fixture
def big(running: tuple[ServerProcess, ServerProcess]) -> Iterator[ServerProcess]:
    """Two A100 and a T4."""
    yield running[0]
    release_all(running[0])


@pytest.fixture
def small(running: tuple[ServerProcess, ServerProcess]) -> Iterator[ServerProcess]:
    """Two GPUs."""
    yield running[1]
    release_all(running[1])


@pytest.fixture
def names(big: ServerProcess, small: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two servers go by names: big.localhost:8000, and small.localhost:8000."""
    real = socket.getaddrinfo
    ports = {"big.localhost": big.port, "small.localhost": small.port, "also-big.localhost": big.port}

    def look_up(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        place = ("127.0.0.1", ports[host]) if host in ports else (host, port)
        return real(*place, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
