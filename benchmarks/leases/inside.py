"""What a lease + release costs inside the server, without HTTP: the same calls on the same app, in one process.

    python -m benchmarks.leases.inside FOLDER        # run by __main__.py: orders on standard input, answers on standard output

Each app has a journal of its own. One writes it in a thread, as the server does. The other writes it in the event loop's
thread, which no server should do: a disk that hangs would stop it from accepting heartbeats. The difference between them
is what it costs to hand the two commits to that thread and back.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.leases.locks import who_asks
from benchmarks.shared.servers import ROOT, START_S
from gpu_worker_pool.server.http.connection import KEY, Connection

DURABILITIES = ("normal", "full")
WRITERS = ("thread", "inline")
GPUS = 8


def name_of(durability: str, writer: str) -> str:
    """Return the name of one app."""
    return f"inside, {durability}, {writer}"


class Inside:
    """The process that runs the apps, as seen by the process that measures."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def cycle_s(self, durability: str, writer: str, cycles: int) -> float:
        """Return the median time of a lease + release, over this many cycles."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([durability, writer, cycles]).encode() + b"\n")
        self._process.stdin.flush()
        return float(self.answer())

    def answer(self) -> Any:
        """Return the next answer of the process."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START_S)[0]:
            raise TimeoutError("the process with the apps says nothing")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process with the apps has ended")
        return json.loads(line)


@contextmanager
def inside(folder: Path) -> Iterator[Inside]:
    """Run the process, and yield it once its apps have started."""
    folder.mkdir()
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LD_LIBRARY_PATH") if key in os.environ}
    settings = {"SIMULATED_GPUS": str(GPUS), "LOG_LEVEL": "warning", "ACCESS_LOG": "false", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.leases.inside", str(folder)],
        env={**kept, **settings},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            found = Inside(process)
            assert found.answer() == "ready"
            yield found
        finally:
            process.kill()


async def serve(folder: Path) -> None:
    """Start an app for each durability and writer, and carry out orders until the input ends."""
    # Imported here, because the process that measures does not need the server.
    from gpu_worker_pool.ledger.writer import InlineWriter, WriterThread  # noqa: PLC0415
    from gpu_worker_pool.server.app import create_app  # noqa: PLC0415
    from gpu_worker_pool.server.authority import authority  # noqa: PLC0415
    from gpu_worker_pool.server.settings import ServerSettings  # noqa: PLC0415

    makers: dict[str, Any] = {"thread": WriterThread, "inline": lambda journal, _: InlineWriter(journal)}
    apps: dict[tuple[str, str], Any] = {}
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        for durability in DURABILITIES:
            for writer in WRITERS:
                os.environ["GPU_POOL_STATE_DIR"] = str(folder / f"{durability}-{writer}")
                os.environ["GPU_POOL_DURABILITY"] = durability
                setattr(authority, "WriterThread", makers[writer])  # noqa: B010 - it is not the type that mypy knows
                app = create_app(ServerSettings())
                await stack.enter_async_context(app.running())
                apps[durability, writer] = app
        print(json.dumps("ready"), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            durability, writer, cycles = json.loads(line)
            print(json.dumps(await measure_s(apps[durability, writer], cycles)), flush=True)


IDS = count()


class OwnConnection(Connection):
    """A connection of this user: there is no socket whose user could be asked for."""

    host = "127.0.0.1"
    uid = os.getuid()


async def measure_s(app: Any, cycles: int) -> float:
    """Return the median time of a lease + release, as `locks.cycle_s` measures it from outside."""
    body = json.dumps(who_asks()).encode()
    times: list[float] = []
    for number in IDS:
        if len(times) == cycles:
            break
        path = f"/leases/inside-{number}"
        began = time.perf_counter()
        granted = await call(app, "PUT", path, body)
        ended = await call(app, "DELETE", path, b"")
        times.append(time.perf_counter() - began)
        assert json.loads(granted)["state"] == "active", granted
        assert json.loads(ended)["state"] == "ended", ended
    return statistics.median(times)


async def call(app: Any, method: str, path: str, body: bytes) -> bytes:
    """Pass one request to the app as uvicorn would, and return the body of the answer."""
    headers = [(b"host", b"localhost")]
    if body:
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http", "method": method, "path": path, "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 5), "root_path": "", KEY: OwnConnection(None, None),
    }  # fmt: skip
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await asyncio.Event().wait()  # the client does not disconnect
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return b"".join(message.get("body", b"") for message in sent)


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
