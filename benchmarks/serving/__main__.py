"""How fast the statistics are served, compared with a plain FastAPI handler and a bare ASGI handler in the same run.

Each server is a process of its own. The load comes from this process over keep-alive connections, and the servers take
turns in each round. Then requests go at a steady rate to servers whose driver hangs and to servers whose driver does not.
It uses loopback only and stops by itself.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.serving.load import Answered, as_many_as_it_takes, at_a_steady_rate, run_on_time
from benchmarks.shared.processes import cpu_s, resident_mb, run_queue_s
from benchmarks.shared.results import Cell, Results, duration, parser
from benchmarks.shared.rounds import in_turn, percentile, ratios, spread, spread_s
from benchmarks.shared.servers import asgi_process, pool_process
from benchmarks.shared.targets import bounded, ratio

CONNECTIONS = (1, 16, 64)
SUMMARY, STATS = "/gpu/summary", "/gpu/stats"
OURS, PLAIN, BARE = "this server", "plain FastAPI", "bare ASGI"
OURS_LOGGED, BARE_LOGGED = "this server, its default settings", "bare ASGI, uvicorn's default settings"
BOTH_OFF, BOTH_ON, OURS_ON = "off for both", "on for both (the default)", "on for ours, off for the bare one"
QUICK_SMI, SLOW_SMI, AGAIN_SMI = "quick nvidia-smi", "slow nvidia-smi", "another quick nvidia-smi"
BESIDE = "bare ASGI, without nvidia-smi"
HANG_PATHS = (STATS, SUMMARY, "/gpu/count", "/health", "/pool", "/metrics")
HANG_RATE, HANG_CONNECTIONS = 200, 4
LEAST_PERCENT, LEAST_PERCENT_LOGGED, MOST_WHILE_HANGING = 80.0, 70.0, 1.25

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
# Logs as uvicorn does by default.
WITH_ACCESS_LOG = """
import logging.config
from uvicorn.config import LOGGING_CONFIG
logging.config.dictConfig(LOGGING_CONFIG)
"""


@dataclass(frozen=True)
class Effort:
    """How much is measured. The load lasts for `readings` readings of the GPUs, each of which takes `reading_s`."""

    rounds: int
    seconds: float
    connections: tuple[int, ...]
    readings: int
    reading_s: float = 2.0
    has_all: bool = True

    @property
    def reading_every_s(self) -> float:
        """Longer than a reading takes, so that a driver that hangs is read as often as one that does not."""
        return 1.25 * self.reading_s


QUICK = Effort(rounds=2, seconds=0.05, connections=(64,), readings=2, reading_s=0.3, has_all=False)
WHOLE = Effort(rounds=11, seconds=0.2, connections=CONNECTIONS, readings=8)


@dataclass
class Server:
    """A server under load, and what it did in each round."""

    port: int
    pid: int
    rates: list[float] = field(default_factory=list)
    answered: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def request_s(self) -> float:
        """The server's processor time for one request."""
        return self.cpu_s / self.answered

    def one_round(self, path: str, connections: int, seconds: float) -> float:
        """Run one more round, and return its requests a second."""
        cpu_before_s = cpu_s(self.pid)
        answered, took_s = as_many_as_it_takes(self.port, path, connections, seconds)
        self.cpu_s += cpu_s(self.pid) - cpu_before_s
        self.answered += answered
        self.seconds += took_s
        self.rates.append(answered / took_s)
        return self.rates[-1]


async def fetch(port: int, path: str) -> bytes:
    """Return the body of one answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer
    return body


def compare(results: Results, effort: Effort, folder: Path) -> None:
    with ExitStack() as stack:
        servers: dict[str, tuple[int, int]] = {}
        sizes: list[list[Cell]] = []

        def start(name: str, begin: Callable[[], tuple[int, int]]) -> None:
            began = time.perf_counter()
            servers[name] = begin()
            sizes.append([name, duration(time.perf_counter() - began), resident_mb(servers[name][1])])

        start(OURS, lambda: stack.enter_context(pool_process(folder / "ours", "8", "full")))
        body = asyncio.run(fetch(servers[OURS][0], SUMMARY))
        plain, bare = PLAIN_FASTAPI.format(body=body), BARE_ASGI.format(body=body)
        if effort.has_all:
            start(PLAIN, lambda: stack.enter_context(asgi_process(folder / "plain", plain)))
        start(BARE, lambda: stack.enter_context(asgi_process(folder / "bare", bare)))
        logged = {"LOG_LEVEL": "info", "ACCESS_LOG": "true"}
        start(OURS_LOGGED, lambda: stack.enter_context(pool_process(folder / "ours-logged", "8", "full", logged)))
        if effort.has_all:
            with_log = WITH_ACCESS_LOG + bare
            start(BARE_LOGGED, lambda: stack.enter_context(asgi_process(folder / "bare-logged", with_log)))
        compare_rates(results, effort, servers)
        results.table("Start to the first answer, and memory while idle", ["", "start", "memory (RSS), MB"], sizes)
        for name in ("ours-logged", "bare-logged")[: 2 if effort.has_all else 1]:
            lines = (folder / name / "log").read_bytes().count(b"GET /gpu/summary")
            assert lines > 0, f"{name} has no access log"


@dataclass(frozen=True)
class Pair:
    """A server of ours and a bare one that took turns, perhaps with others."""

    path: str
    connections: int
    logs: str
    found: dict[str, Server]
    ours: str = OURS
    bare: str = BARE

    @property
    def percents(self) -> list[float]:
        """Our rate in percent of the bare one's, for each round."""
        return [100 * ratio for ratio in ratios(self.found[self.ours].rates, self.found[self.bare].rates)]

    @property
    def percent(self) -> float:
        return statistics.median(self.percents)

    @property
    def by_cpu(self) -> str | None:
        """The same by the processor time of a request, in which other processes of the machine do not show."""
        ours, bare = self.found[self.ours], self.found[self.bare]
        # The clock is coarse: it may show no time at all in the rounds of a quick run.
        return f"{100 * bare.request_s / ours.request_s:.0f} %" if ours.cpu_s and bare.cpu_s else None

    def row(self) -> list[Cell]:
        ours, bare = self.found[self.ours], self.found[self.bare]
        plain = self.found.get(PLAIN) if self.ours == OURS else None
        return [
            f"{self.path}, {self.connections}",
            self.logs,
            *(round(statistics.median(one.rates)) if one else None for one in (ours, plain, bare)),
            f"{self.percent:.0f} %",
            f"{min(self.percents):.0f} to {max(self.percents):.0f} %",
            self.by_cpu,
            f"{100 * ours.cpu_s / ours.seconds:.0f} %",
        ]


def compare_rates(results: Results, effort: Effort, servers: dict[str, tuple[int, int]]) -> None:
    without_log = [name for name in servers if name in {OURS, PLAIN, BARE}]
    found = {
        connections: take_turns(effort, servers, servers if connections == 64 else without_log, SUMMARY, connections)
        for connections in effort.connections
    }
    off, ours_only = Pair(SUMMARY, 64, BOTH_OFF, found[64]), Pair(SUMMARY, 64, OURS_ON, found[64], OURS_LOGGED)
    both = [Pair(SUMMARY, 64, BOTH_ON, found[64], OURS_LOGGED, BARE_LOGGED)] if effort.has_all else []
    fewer = [Pair(SUMMARY, connections, BOTH_OFF, found[connections]) for connections in found if connections != 64]
    stats = Pair(STATS, 64, BOTH_OFF, take_turns(effort, servers, [OURS, BARE], STATS, 64))
    results.table(
        f"Requests a second, medians of {effort.rounds} alternating rounds of {effort.seconds:g} s",
        [
            "GET, connections", "access log", OURS, PLAIN, BARE,
            "ours relative to bare", "rounds", "ours relative to bare, by processor time", "ours used of a processor",
        ],
        [pair.row() for pair in (*fewer, off, *both, ours_only, stats)],
        note="The other servers always give the answer of /gpu/summary. By processor time: the server's own time for each "
        "request, in which other processes of the machine do not show.",
    )  # fmt: skip
    for figure_id, pair, least in (
        ("statistics_vs_bare", off, LEAST_PERCENT),
        ("statistics_logged_vs_bare", ours_only, LEAST_PERCENT_LOGGED),
    ):
        others = [f"access log {other.logs}: {other.percent:.0f} %" for other in both if pair is ours_only]
        bounded(
            results,
            figure_id,
            f"`GET {SUMMARY}`, 64 connections, access log {pair.logs}: requests a second, relative to a bare ASGI handler",
            pair.percent,
            "%",
            least=least,
            spread="; ".join(
                (f"rounds: {spread(pair.percents)}", f"by processor time: {pair.by_cpu or 'not known'}", *others)
            ),
            why=f"a request takes {duration(pair.found[pair.ours].request_s)} of this server's processor time and "
            f"{duration(pair.found[pair.bare].request_s)} of the bare handler's; this server looks up the request "
            f"before it sends the ready bytes{', and writes a line of its log' * (pair is ours_only)}",
        )


def take_turns(
    effort: Effort, servers: dict[str, tuple[int, int]], names: Iterable[str], path: str, connections: int
) -> dict[str, Server]:
    """Put these servers under the same load, in turn."""
    found = {name: Server(*servers[name]) for name in names}

    def one_round(name: str) -> float:
        # The other servers always give the answer of the summary.
        asked = path if name in {OURS, OURS_LOGGED} else SUMMARY
        return found[name].one_round(asked, connections, effort.seconds)

    in_turn({name: partial(one_round, name) for name in found}, effort.rounds)
    return found


def hang(results: Results, effort: Effort, folder: Path) -> None:
    """Measure GETs at a steady rate while every reading of the GPUs takes long, and at the same time while it is quick."""
    row = "echo 0, GPU-1, 'Fake GPU', 1000, 10, 0, 30, 50, 100"
    waits_s = {QUICK_SMI: 0.0, SLOW_SMI: effort.reading_s}
    if effort.has_all:
        waits_s[AGAIN_SMI] = 0.0  # how much two equal servers differ
    with ExitStack() as stack:
        bare = BARE_ASGI.format(body=b"{}")
        servers = {BESIDE: stack.enter_context(asgi_process(folder / "beside", bare))}
        for number, (kind, wait_s) in enumerate(waits_s.items()):
            programs = folder / f"bin-{number}"
            programs.mkdir()
            script = programs / "nvidia-smi"
            script.write_text(
                f'#!/bin/sh\ncase "$1" in *compute*) exit 0;; esac\nsleep {wait_s:g}; {row}\n', encoding="utf-8"
            )
            script.chmod(0o755)
            env = {"PATH": f"{programs}:{os.environ['PATH']}", "REFRESH_INTERVAL": f"{effort.reading_every_s:g}"}
            servers[kind] = stack.enter_context(pool_process(folder / f"hang-{number}", "", "full", env))
        seconds = effort.readings * effort.reading_every_s
        before_s = {kind: run_queue_s(pid) for kind, (_, pid) in servers.items()}
        ports = {kind: port for kind, (port, _) in servers.items()}
        found = run_on_time(at_a_steady_rate(ports, HANG_PATHS, HANG_RATE, seconds, HANG_CONNECTIONS))
        # For each second of the load.
        waited_s = {kind: (run_queue_s(pid) - before_s[kind]) / seconds for kind, (_, pid) in servers.items()}
    _show_hang(results, effort, found, waited_s)


def _show_hang(results: Results, effort: Effort, found: dict[str, list[Answered]], waited_s: dict[str, float]) -> None:
    about = (
        f"a reading of the GPUs takes {effort.reading_s:g} s or almost no time; one begins every "
        f"{effort.reading_every_s:g} s, {effort.readings} readings in all"
    )
    results.table(
        f"GETs while the driver hangs: {about}",
        [
            "",
            "median",
            "p99",
            "p99, by reading",
            "longest",
            "longest, by reading",
            "waited for a processor, ms a second",
            "requests",
        ],
        [
            [
                kind,
                duration(statistics.median(latencies(answered))),
                duration(p99(answered)),
                spread_s(by_reading(answered, effort, p99)),
                duration(longest(answered)),
                spread_s(by_reading(answered, effort, longest)),
                1000 * waited_s[kind],
                len(answered),
            ]
            for kind, answered in found.items()
        ],
        note=f"Each server gets {HANG_RATE} requests a second, at times fixed in advance and counted from those times, over "
        f"{HANG_CONNECTIONS} connections. All servers run at the same time. The paths {', '.join(HANG_PATHS)} take turns. A "
        "fake nvidia-smi replaces the driver. The bare server always gives the same answer, and shows what the machine does to any "
        "server; so does the time for which the event loop of each was ready and had no processor. By reading: the lowest and the highest value of the intervals from one "
        "reading to the next.",
    )
    results.table(
        "The same by path: p99",
        ["GET", *found],
        [
            [path, *(duration(p99([one for one in answered if one.path == path])) for answered in found.values())]
            for path in HANG_PATHS
        ],
    )
    slow, quick, noise = beside(found, effort, p99)
    waits = ", ".join(f"{kind}: {duration(wait_s)}" for kind, wait_s in waited_s.items())
    ratio(
        results,
        "statistics_while_probe_hangs",
        f"any GET ({len(HANG_PATHS)} paths in turn, 1 GPU) while `nvidia-smi` takes {effort.reading_s:g} s, relative to while "
        f"it is quick: the p99, median of {effort.readings} readings",
        slow,
        quick,
        most=MOST_WHILE_HANGING,
        spread=f"{_alike(noise)}; a bare server beside them: {spread_s(by_reading(found[BESIDE], effort, p99))}; longest of "
        f"all: {duration(longest(found[SLOW_SMI]))}; waiting for a processor, in each second: {waits}",
        why=f"not known; {_alike(noise)}, and see how long each server waited for a processor",
    )


def beside(
    found: dict[str, list[Answered]], effort: Effort, measure: Callable[[Sequence[Answered]], float]
) -> tuple[list[float], list[float], float | None]:
    """Return, by reading, the values of the slow server and the mean of the quick ones, and the ratio of the quick ones."""
    kinds = (kind for kind in (SLOW_SMI, QUICK_SMI, AGAIN_SMI) if kind in found)
    slow, *quick = (by_reading(found[kind], effort, measure) for kind in kinds)
    noise = statistics.median(ratios(quick[1], quick[0])) if len(quick) > 1 else None
    return slow, [statistics.fmean(values) for values in zip(*quick, strict=True)], noise


def by_reading(
    answered: Iterable[Answered], effort: Effort, measure: Callable[[Sequence[Answered]], float]
) -> list[float]:
    """Return one value for each interval from one reading to the next: a burst of noise is in few of them."""
    found: list[list[Answered]] = [[] for _ in range(effort.readings)]
    for one in answered:
        found[min(int(one.due_s / effort.reading_every_s), effort.readings - 1)].append(one)
    return [measure(some) for some in found]


def latencies(answered: Iterable[Answered]) -> list[float]:
    return [one.latency_s for one in answered]


def p99(answered: Iterable[Answered]) -> float:
    return percentile(latencies(answered), 99)


def longest(answered: Iterable[Answered]) -> float:
    return max(latencies(answered))


def _alike(noise: float | None) -> str:
    return "there was only one quick server" if noise is None else f"two quick servers differ by {noise:.2f} x"


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    results = Results("serving", "How fast the statistics are served, and whether a driver that hangs slows them down.")
    with tempfile.TemporaryDirectory(prefix="serving-benchmark-") as name:
        compare(results, effort, Path(name))
        hang(results, effort, Path(name))
    results.finish(options)


if __name__ == "__main__":
    main()
