"""How fast the statistics are served, beside a plain FastAPI handler and a bare ASGI handler in the same run.

Each server is a process of its own; the load comes from this process over keep-alive connections. Rounds alternate
between the servers. Loopback only; it stops by itself.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lease_locks import size_of_answer
from lease_servers import asgi_process, pool_process, resident_mb
from results import Cell, Results, duration, parser
from rounds import in_turn, median_ratio, percentile, ratios, spread, spread_s

CONNECTIONS = (1, 16, 64)
SUMMARY, STATS = "/gpu/summary", "/gpu/stats"
OURS, PLAIN, BARE = "this server", "plain FastAPI", "bare ASGI"
AGAIN = "another quick"
MOST_WHILE_HANGING = 1.25

PLAIN_FASTAPI = """
import json
from fastapi import FastAPI
app = FastAPI()
SUMMARY = json.loads({body!r})
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
class Effort:
    rounds: int
    seconds: float
    connections: tuple[int, ...]
    hang_rounds: int
    look_s: float = 2.0
    has_all: bool = True


QUICK = Effort(rounds=2, seconds=0.05, connections=(64,), hang_rounds=2, look_s=0.3, has_all=False)
WHOLE = Effort(rounds=5, seconds=0.6, connections=CONNECTIONS, hang_rounds=10)


class Caller(asyncio.Protocol):
    """One keep-alive connection that asks again as soon as it is answered."""

    def __init__(self, path: str, until: float) -> None:
        self._request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        self._until = until
        self._received = b""
        self.latencies_s: list[float] = []
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        size = size_of_answer(self._received)
        if size is None or len(self._received) < size:
            return
        now = time.perf_counter()
        self.latencies_s.append(now - self._asked)
        if not self._received.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(AssertionError(self._received))
            self._transport.close()
        elif now < self._until:
            self._ask()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _ask(self) -> None:
        self._received = b""
        self._asked = time.perf_counter()
        self._transport.write(self._request)


async def load(port: int, path: str, connections: int, seconds: float) -> list[float]:
    """The latency of every request made in this time."""
    until = time.perf_counter() + seconds
    loop = asyncio.get_running_loop()
    callers: list[Caller] = []
    for _ in range(connections):
        _, caller = await loop.create_connection(lambda: Caller(path, until), "127.0.0.1", port)
        callers.append(caller)
    await asyncio.wait_for(asyncio.gather(*(caller.done for caller in callers)), seconds + 60)
    return [latency for caller in callers for latency in caller.latencies_s]


async def fetch(port: int, path: str) -> bytes:
    """The body of one answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer
    return body


def compare(results: Results, effort: Effort, folder: Path) -> None:
    with ExitStack() as stack:
        ports: dict[str, int] = {}
        sizes: list[list[Cell]] = []

        def start(name: str, begin: Callable[[], tuple[int, int]]) -> None:
            began = time.perf_counter()
            ports[name], pid = begin()
            sizes.append([name, duration(time.perf_counter() - began), resident_mb(pid)])

        start(OURS, lambda: stack.enter_context(pool_process(folder / "ours", "8", "full")))
        body = asyncio.run(fetch(ports[OURS], SUMMARY))
        plain, bare = PLAIN_FASTAPI.format(body=body), BARE_ASGI.format(body=body)
        if effort.has_all:
            start(PLAIN, lambda: stack.enter_context(asgi_process(folder / "plain", plain)))
        start(BARE, lambda: stack.enter_context(asgi_process(folder / "bare", bare)))
        for path in (SUMMARY, STATS):
            _rates(results, effort, path, ports)
        results.table("Start to the first answer, and memory while idle", ["", "start", "memory, MB"], sizes)


def _rates(results: Results, effort: Effort, path: str, ports: dict[str, int]) -> None:
    rows: list[list[Cell]] = []
    for connections in effort.connections:

        def rate(name: str, connections: int = connections) -> float:
            # The others have one answer, which is that of the summary.
            asked = path if name == OURS else SUMMARY
            began = time.perf_counter()
            answered = len(asyncio.run(load(ports[name], asked, connections, effort.seconds)))
            return answered / (time.perf_counter() - began)

        rates = in_turn({name: partial(rate, name) for name in ports}, effort.rounds)
        percents = [100 * ratio for ratio in ratios(rates[OURS], rates[BARE])]
        share = statistics.median(percents)
        medians = [round(statistics.median(rates[name])) for name in ports]
        rows.append([connections, *medians, f"{share:.0f} %", f"{min(percents):.0f} to {max(percents):.0f} %"])
        if (path, connections) == (SUMMARY, 64):
            results.figure(
                "statistics_vs_bare",
                f"`GET {path}`, {connections} connections, beside a bare ASGI handler: requests a second",
                value=share,
                unit="%",
                target=">= 50 %",
                is_met=share >= 50,
                spread=f"rounds: {spread(percents)}",
                why="a request is looked up and counted before its ready bytes are sent; the bare handler does neither",
            )
    results.table(
        f"GET {path}: requests a second, medians of {effort.rounds} rounds of {effort.seconds:g} s in turn",
        ["connections", *ports, "ours of bare", "rounds"],
        rows,
        note="The others have one answer, which is that of /gpu/summary." if path != SUMMARY else "",
    )


def hang(results: Results, effort: Effort, folder: Path) -> None:
    """The p99 of a GET while every look at the GPUs takes long, beside that with a quick one, in turn."""
    row = "echo 0, GPU-1, 'Fake GPU', 1000, 10, 0, 30, 50, 100"
    kinds = {"quick": "", "slow": f"sleep {effort.look_s:g}; "}
    if effort.has_all:
        kinds[AGAIN] = ""  # how far two that are alike differ
    with ExitStack() as stack:
        ports: dict[str, int] = {}
        for kind, wait in kinds.items():
            programs = folder / f"{kind}-bin"
            programs.mkdir()
            script = programs / "nvidia-smi"
            script.write_text(f'#!/bin/sh\ncase "$1" in *compute*) exit 0;; esac\n{wait}{row}\n', encoding="utf-8")
            script.chmod(0o755)
            env = {"PATH": f"{programs}:{os.environ['PATH']}", "REFRESH_INTERVAL": "0.5"}
            ports[kind], _ = stack.enter_context(pool_process(folder / kind, "", "full", env))
        latencies: dict[str, list[float]] = {kind: [] for kind in kinds}

        def p99(kind: str) -> float:
            times = asyncio.run(load(ports[kind], STATS, 16, effort.seconds))
            latencies[kind] += times
            return percentile(times, 99)

        found = in_turn({kind: partial(p99, kind) for kind in kinds}, effort.hang_rounds)
    rows: list[list[Cell]] = [
        [
            f"{kind} nvidia-smi",
            duration(statistics.median(latencies[kind])),
            duration(statistics.median(found[kind])),
            spread_s(found[kind]),
            duration(max(latencies[kind])),
            len(latencies[kind]),
        ]
        for kind in kinds
    ]
    results.table(
        f"GET {STATS} while each look at the GPUs takes {effort.look_s:g} s, beside a quick one: {effort.hang_rounds} rounds in turn",
        ["", "median", "p99, median of rounds", "p99, rounds", "most", "requests"],
        rows,
        note="16 connections; a fake nvidia-smi stands where the driver would be.",
    )
    ratio = median_ratio(found["slow"], found["quick"])
    noise = median_ratio(found[AGAIN], found["quick"]) if AGAIN in found else None
    results.figure(
        "statistics_while_probe_hangs",
        f"p99 of `GET {STATS}` while `nvidia-smi` takes {effort.look_s:g} s, beside while it does not",
        value=ratio,
        unit="x",
        target=f"unchanged: <= {MOST_WHILE_HANGING} x",
        is_met=ratio <= MOST_WHILE_HANGING,
        spread=f"rounds: {spread(ratios(found['slow'], found['quick']))}",
        why=f"two servers that are alike differ as well in this run, by {noise:.2f} x" if noise else "not known",
    )


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    results = Results("serving", "How fast the statistics are served, and whether a driver that hangs is felt.")
    with tempfile.TemporaryDirectory(prefix="serving-benchmark-") as name:
        compare(results, effort, Path(name))
        hang(results, effort, Path(name))
    results.finish(options)


if __name__ == "__main__":
    main()
