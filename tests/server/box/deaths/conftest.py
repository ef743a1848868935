"""A death watch on each event loop, and processes to watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop

from tests.server.box.deaths.processes import Child, Reports


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    loop: asyncio.AbstractEventLoop = request.param()
    yield loop
    loop.close()


@pytest.fixture
def reports(loop: asyncio.AbstractEventLoop) -> Reports:
    return Reports(loop)


@pytest.fixture
def child() -> Iterator[Callable[[], Child]]:
    children: list[Child] = []

    def start() -> Child:
        children.append(Child())
        return children[-1]

    yield start
    for one in children:
        one.popen.kill()
        one.end()
