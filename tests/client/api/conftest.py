"""A big and a small server for the tests of one file."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.api.two_servers import ENV
from tests.server.leasing import release_all
from tests.server.running import RunningServer


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[RunningServer, RunningServer]]:
    big, small = (
        RunningServer({**ENV, "SIMULATED_GPUS": "2xA100-80GB,1xT4"}),
        RunningServer({**ENV, "SIMULATED_GPUS": "2"}),
    )
    with big, small:
        yield big, small


@pytest.fixture
def big(running: tuple[RunningServer, RunningServer]) -> Iterator[RunningServer]:
    """Two A100 and a T4."""
    yield running[0]
    release_all(running[0])


@pytest.fixture
def small(running: tuple[RunningServer, RunningServer]) -> Iterator[RunningServer]:
    """Two GPUs."""
    yield running[1]
    release_all(running[1])


@pytest.fixture
def names(big: RunningServer, small: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two servers go by names: big.localhost:8000, and small.localhost:8000."""
    real = socket.getaddrinfo
    ports = {"big.localhost": big.port, "small.localhost": small.port, "also-big.localhost": big.port}

    def look_up(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        place = ("127.0.0.1", ports[host]) if host in ports else (host, port)
        return real(*place, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
