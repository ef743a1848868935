"""A server with statistics and nothing else, in the event loop of the test: as an older or a foreign one is."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tests.listener import Listener

SOON_S = 20.0


def idle(number: int) -> list[dict[str, Any]]:
    """That many GPUs on which nothing runs, as /gpu/summary shows them."""
    return [
        {"gpu_id": index, "name": "NVIDIA A100", "memory_usage_percent": 1.0, "utilization_percent": 0}
        for index in range(number)
    ]


async def until(look: Callable[[], bool], what: str, within_s: float = SOON_S) -> None:
    """Let the others run until this is so."""
    deadline = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.001)


class StatisticsServer:
    """Answers /gpu/summary and /gpu/stats from `gpus`, which may be changed at any time, and 404 to all else.

    Where it hangs it takes a call and answers it only when it is closed. `calls` are all that came in.
    """

    def __init__(self, gpus: int | list[dict[str, Any]] = 0, *, hangs: bool = False, port: int = 0) -> None:
        self.gpus = idle(gpus) if isinstance(gpus, int) else gpus
        self.hangs = hangs
        self.calls: list[str] = []
        self._listener = Listener(self._serve, port)

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def polls(self) -> int:
        """How often its GPUs were looked at."""
        return self.calls.count("GET /gpu/summary")

    async def wait_for_polls(self, number: int) -> None:
        """Until it was looked at that often from now on, and all but the last have been taken in."""
        goal = self.polls + number
        await until(lambda: self.polls >= goal, f"{goal} looks at {self.url}")

    async def start(self) -> None:
        """Start, or start again on the same port."""
        self._listener.start()

    async def stop(self) -> None:
        """As if it had died: connections are cut, and new ones are refused."""
        await self._listener.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            self.calls.append(f"{method} {path}")
            length = next((int(line[15:]) for line in head.splitlines() if line.lower()[:15] == "content-length:"), 0)
            await reader.readexactly(length)
            if self.hangs:
                await reader.read()
                return
            writer.write(self._answer(path))

    def _answer(self, path: str) -> bytes:
        status, found = 200, {}
        if path == "/gpu/summary":
            found = {"gpu_count": len(self.gpus), "gpus_summary": self.gpus}
        elif path == "/gpu/stats":
            sizes = [{"gpu_id": gpu["gpu_id"], "memory": {"total_mb": 80_000}} for gpu in self.gpus]
            found = {"gpu_count": len(self.gpus), "gpus": sizes}
        else:
            status, found = 404, {"detail": "Not Found"}
        body = json.dumps(found).encode()
        head = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body
