"""How fast the statistics are served, beside a plain FastAPI handler and a bare ASGI handler in the same run.

Each server runs in a process of its own under uvicorn; the load comes from this process over keep-alive connections.
Rounds alternate between the servers, and the median of each is printed. Loopback only; it stops by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONNECTIONS = (1, 16, 64)

PLAIN_FASTAPI = """
from fastapi import FastAPI
app = FastAPI()
SUMMARY = {summary}
@app.get("/gpu/summary")
async def summary():
    return SUMMARY
"""
BARE_ASGI = """
BODY = {body!r}
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(BODY)).encode())]
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({{"type": message["type"] + ".complete"}})
            if message["type"] == "lifespan.shutdown":
                return
    await send({{"type": "http.response.start", "status": 200, "headers": HEADERS}})
    await send({{"type": "http.response.body", "body": BODY}})
"""


@dataclass(frozen=True)
class Server:
    name: str
    port: int
    pid: int
    start_s: float

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def serving(name: str, module: str, folder: Path, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server under uvicorn, from the start to the first 200."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", f"{module}:app", "--port", str(port), "--no-access-log"]
    settings = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{folder}",
        "GPU_POOL_STATE_DIR": str(folder / "state"),
        **(env or {}),
    }
    began = time.perf_counter()
    process = subprocess.Popen([*command, "--log-level", "warning"], cwd=folder, env=settings)
    try:
        while time.perf_counter() - began < 30:
            try:
                if asyncio.run(fetch(port, "/gpu/summary")).startswith(b"HTTP/1.1 200"):
                    break
            except ConnectionRefusedError:
                time.sleep(0.005)
        else:
            raise RuntimeError(f"{name} did not start")
        yield Server(name, port, process.pid, time.perf_counter() - began)
    finally:
        process.terminate()
        process.wait(timeout=10)


async def fetch(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


class Caller(asyncio.Protocol):
    """One keep-alive connection that asks again as soon as it is answered."""

    def __init__(self, path: str, until: float) -> None:
        self.request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        self.until = until
        self.latencies_s: list[float] = []
        self.done = asyncio.get_running_loop().create_future()
        self.pending = b""
        self.size: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.asked = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.pending += data
        if self.size is None and (end := self.pending.find(b"\r\n\r\n")) >= 0:
            assert self.pending.startswith(b"HTTP/1.1 200"), self.pending[:100]
            head = self.pending[:end].lower()
            length = head.split(b"content-length:")[1].split(b"\r\n")[0]
            self.size = end + 4 + int(length)
        if self.size is not None and len(self.pending) >= self.size:
            now = time.perf_counter()
            self.latencies_s.append(now - self.asked)
            self.pending, self.size = self.pending[self.size :], None
            if now < self.until:
                self.ask()
            else:
                self.transport.close()
                self.done.set_result(None)


async def load(port: int, path: str, connections: int, seconds: float) -> list[float]:
    """The latency of every request made in this time."""
    until = time.perf_counter() + seconds
    loop = asyncio.get_running_loop()
    callers: list[Caller] = []
    for _ in range(connections):
        _, caller = await loop.create_connection(lambda: Caller(path, until), "127.0.0.1", port)
        callers.append(caller)
    await asyncio.gather(*(caller.done for caller in callers))
    return [latency for caller in callers for latency in caller.latencies_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few and short rounds, to see that it runs")
    options = parser.parse_args()
    rounds, seconds = (1, 0.2) if options.quick else (5, 1.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {"SIMULATED_GPUS": "8", "LOG_LEVEL": "warning"}
        with serving("this server", "gpu_worker_pool.gpu_server", folder, environment) as ours:
            body = asyncio.run(fetch(ours.port, "/gpu/summary")).split(b"\r\n\r\n", 1)[1]
            (folder / "bare_asgi.py").write_text(BARE_ASGI.format(body=body), encoding="utf-8")
            (folder / "plain_fastapi.py").write_text(
                PLAIN_FASTAPI.format(summary=body.decode().replace("null", "None").replace("true", "True")),
                encoding="utf-8",
            )
            with (
                serving("plain FastAPI", "plain_fastapi", folder) as plain,
                serving("bare ASGI", "bare_asgi", folder) as bare,
            ):
                compare(ours, plain, bare, rounds, seconds)
    hang(rounds, seconds)


def compare(ours: Server, plain: Server, bare: Server, rounds: int, seconds: float) -> None:
    print(f"{'GET':>12} {'connections':>11} {'this server':>12} {'plain FastAPI':>14} {'bare ASGI':>10} {'of bare':>8}")
    for path in ("/gpu/summary", "/gpu/stats"):
        for connections in CONNECTIONS:
            rates: dict[str, list[float]] = {}
            for _ in range(rounds):
                for server in (ours, plain, bare):
                    asked = path if server is ours else "/gpu/summary"
                    latencies = asyncio.run(load(server.port, asked, connections, seconds))
                    rates.setdefault(server.name, []).append(len(latencies) / seconds)
            median = {server: statistics.median(found) for server, found in rates.items()}
            share = 100 * median[ours.name] / median[bare.name]
            print(
                f"{path:>12} {connections:>11} {median[ours.name]:>10,.0f}/s {median[plain.name]:>12,.0f}/s "
                f"{median[bare.name]:>8,.0f}/s {share:>6.0f} %"
            )
    print(f"\n{'':>14} {'start to first 200':>19} {'idle memory':>12}")
    for server in (ours, plain, bare):
        print(f"{server.name:>14} {server.start_s:>17.2f} s {server.memory_mb():>9.0f} MB")


def hang(rounds: int, seconds: float) -> None:
    """The p99 of a GET while every look at the GPUs takes two seconds, beside that with a quick one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row = "echo 0, GPU-1, 'Fake GPU', 1000, 10, 0, 30, 50, 100"
        for kind, wait in (("quick", ""), ("slow", "sleep 2; ")):
            (folder / kind).mkdir()
            script = folder / kind / "nvidia-smi"
            script.write_text(f'#!/bin/sh\ncase "$1" in *compute*) exit 0;; esac\n{wait}{row}\n', encoding="utf-8")
            script.chmod(0o755)
        print("\np99 of GET /gpu/stats, 16 connections (a fake nvidia-smi stands where the driver would be)")
        for kind in ("quick", "slow"):
            env = {"PATH": f"{folder / kind}:{os.environ['PATH']}", "SIMULATED_GPUS": "", "REFRESH_INTERVAL": "0.5"}
            with serving(kind, "gpu_worker_pool.gpu_server", folder, env) as server:
                latencies = sorted(
                    latency
                    for _ in range(rounds)
                    for latency in asyncio.run(load(server.port, "/gpu/stats", 16, seconds))
                )
                print(
                    f"{kind:>14} nvidia-smi: {latencies[int(len(latencies) * 0.99)] * 1000:.2f} ms of {len(latencies):,}"
                )


if __name__ == "__main__":
    main()
