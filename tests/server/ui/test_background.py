"""What the server does for pages, leases do not wait for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Scope

from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.settings import ServerSettings


class TimerLoop(asyncio.SelectorEventLoop):
    """Counts the timers that are set."""

    timers = 0

    def call_at(self, when: float, *args: Any, **options: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self.timers += 1
        return super().call_at(when, *args, **options)


@pytest.mark.parametrize(("path", "rests"), [("/ui/data/pool", True), ("/pool", False)])
def test_the_pool_of_pages_is_made_with_rests_and_that_of_programs_without(
    tmp_path: Path, path: str, *, rests: bool
) -> None:
    """Two hundred GPUs take many milliseconds. Made at once, they would hold up the leases of that moment."""
    settings = ServerSettings(
        simulated_gpus="256", refresh_interval=60, gpu_pool_state_dir=str(tmp_path), gpu_pool_socket="", _env_file=None
    )

    async def timers_of_call() -> int:
        app, loop = create_app(settings), asyncio.get_running_loop()
        assert isinstance(loop, TimerLoop)
        async with app.running():
            before = loop.timers
            assert await _get(app, path) == 200
            return loop.timers - before

    with asyncio.Runner(loop_factory=TimerLoop) as runner:
        timers = runner.run(timers_of_call())
    # The server itself sets two or three.
    assert (timers > 4) == rests


async def _get(app: Any, path: str) -> int:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    headers = [(b"host", b"localhost")]
    scope: Scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
    await app({**scope, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000)}, receive, send)
    return int(sent[0]["status"])
