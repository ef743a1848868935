"""The servers that benchmarks start on free ports of this machine, ours and others to compare with."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_worker_pool.testing import ServerProcess

ROOT = Path(__file__).parents[2]
START_S = 30.0

# Answers like the lease calls and does nothing else, to show what HTTP itself costs under the same server.
BARE_ASGI = """
BODIES = {"PUT": b'{"state": "active"}', "DELETE": b'{"state": "ended"}', "GET": b"{}"}
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    if scope["method"] == "PUT":
        await receive()
    body = BODIES[scope["method"]]
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 201 if scope["method"] == "PUT" else 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def pool_server(folder: Path, gpus: int, durability: str, env: dict[str, str] | None = None) -> Iterator[int]:
    """Run this server with simulated GPUs, and yield its port once it is ready."""
    with pool_process(folder, str(gpus), durability, env) as (port, _):
        yield port


@contextmanager
def pool_process(
    folder: Path, gpus: str, durability: str, env: dict[str, str] | None = None
) -> Iterator[tuple[int, int]]:
    """Run this server with the GPUs that `SIMULATED_GPUS` describes, and yield its port and pid once it is ready."""
    with pool(folder, gpus, durability, env) as server:
        yield server.port, server.pid


def pool(folder: Path, gpus: str, durability: str, env: dict[str, str] | None = None) -> ServerProcess:
    """Return this server with the GPUs that `SIMULATED_GPUS` describes. It starts when it is entered."""
    settings = {
        "SIMULATED_GPUS": gpus,
        "REFRESH_INTERVAL": "1",  # the server's default
        "GPU_POOL_STATE_DIR": str(folder),
        "GPU_POOL_DURABILITY": durability,
        "LOG_LEVEL": "warning",
        "ACCESS_LOG": "false",
        **(env or {}),
    }
    return ServerProcess(settings, folder=folder)


@contextmanager
def bare_server(folder: Path) -> Iterator[tuple[int, int]]:
    """Run a handler under uvicorn that answers every call with constant bytes, and yield its port and pid."""
    with asgi_process(folder, BARE_ASGI) as found:
        yield found


@contextmanager
def asgi_process(folder: Path, source: str) -> Iterator[tuple[int, int]]:
    """Run the `app` of a program under uvicorn, and yield its port and pid after its first answer."""
    port = free_port()
    folder.mkdir()
    (folder / "compared.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "uvicorn", "compared:app", "--port", str(port), "--no-access-log"]
    with (
        (folder / "log").open("wb") as log,
        _process([*command, "--log-level", "warning"], dict(os.environ), folder, log.fileno()) as pid,
    ):
        _wait_for(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 ", folder)
        yield port, pid


@contextmanager
def redis_server(folder: Path, *, is_durable: bool) -> Iterator[int]:
    """Run a Redis that keeps nothing, or one that syncs every change to the disk before it answers; yield its port."""
    port = free_port()
    folder.mkdir()
    found = shutil.which("redis-server")
    assert found is not None, "redis-server is not on the PATH"
    append_only = ["yes", "--appendfsync", "always"] if is_durable else ["no"]
    command = [found, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with (
        (folder / "log").open("wb") as log,
        _process([*command, "--appendonly", *append_only], dict(os.environ), folder, log.fileno()),
    ):
        _wait_for(port, b"PING\r\n", b"+PONG", folder)
        yield port


@contextmanager
def _process(command: list[str], env: dict[str, str], folder: Path, log: int) -> Iterator[int]:
    process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, question: bytes, answer: bytes, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while not answers(port, question, answer):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start: {(folder / 'log').read_text()}")
        time.sleep(0.01)


def answers(port: int, question: bytes, answer: bytes) -> bool:
    """Whether the server at this port gives this answer to the question."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(question)
            return connection.recv(4096).startswith(answer)
    except OSError:
        return False
