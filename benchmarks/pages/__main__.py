"""How much open pages slow leases down: lease + release of one client with 50 pages open, compared with none.

The server, the client and the pages are three processes on this machine. Rounds with and without pages alternate.
Compare the ratios of rounds that follow each other: the times depend on the machine and the day. It stops by itself.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.leases.locks import PoolLease, who_asks
from benchmarks.shared.processes import cpu_s, run_queue_s
from benchmarks.shared.results import Cell, Results, duration, parser, show
from benchmarks.shared.rounds import in_turn, median_ratio, percentile, ratios, spread, spread_s
from benchmarks.shared.servers import ROOT, pool_process
from benchmarks.shared.targets import ratio

# How long pages take to settle after they are opened or closed.
SETTLE_S = 0.3
MOST = 1.3


@dataclass(frozen=True)
class Effort:
    pages: int
    rounds: int
    seconds: float


QUICK = Effort(pages=5, rounds=1, seconds=0.1)
WHOLE = Effort(pages=50, rounds=6, seconds=2.0)


@dataclass(frozen=True)
class Case:
    """A server: its GPUs, the leases of other clients, and what the measured client asks for."""

    name: str
    gpus: str
    held: int = 0
    waiting: int = 0
    wishes: Mapping[str, object] = field(default_factory=dict)


# All but one GPU are held, and many clients wait for those.
A100 = {"model": "A100"}
LARGE = Case("200 GPUs, 500 leases, 300 of them waiting", "200xT4,1xA100-80GB", 200, 300, A100)
FEWER = Case("20 GPUs, 50 leases, 30 of them waiting", "20xT4,1xA100-80GB", 20, 30, A100)


@dataclass
class State:
    """What was measured with pages, or without."""

    latencies_s: list[float] = field(default_factory=list)
    p99s_s: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    # How long the server was ready and had no processor, in each second.
    waited: list[float] = field(default_factory=list)
    polls: int = 0


class Crowd:
    """The pages, in a process of their own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def open(self, pages: int) -> None:
        self._tell(f"open {pages}")

    def close(self) -> int:
        """Close the pages, and return how often they polled while they were open."""
        return self._tell("close")

    def _tell(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process of the pages has ended"
        return int(answer)


@contextmanager
def crowd(port: int) -> Iterator[Crowd]:
    command = [sys.executable, "-m", "benchmarks.pages.crowd", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Crowd(process)
        finally:
            process.terminate()


def fill(port: int, case: Case) -> None:
    """Add other clients that hold GPUs, and that wait for them."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        for number in range(case.held + case.waiting):
            form = {"owner": f"owner-{number % 20}", "worker_id": f"worker-{number}", "model": "T4", "ttl_s": 3600.0}
            form["labels"] = {"command": f"python train.py --seed {number}"}
            connection.request("PUT", f"/leases/other-{number}", json.dumps(form).encode())
            response = connection.getresponse()
            assert response.status == (201 if number < case.held else 202), (number, response.read())
            response.read()


def measure(lease: PoolLease, pid: int, seconds: float, state: State) -> float:
    """Return the median of a lease + release within this time."""
    time.sleep(SETTLE_S)
    times: list[float] = []
    used, waited, began = cpu_s(pid), run_queue_s(pid), time.perf_counter()
    while (start := time.perf_counter()) < began + seconds:
        lease.acquire()
        lease.release()
        times.append(time.perf_counter() - start)
    took_s = time.perf_counter() - began
    state.cpu.append((cpu_s(pid) - used) / took_s)
    state.waited.append((run_queue_s(pid) - waited) / took_s)
    state.latencies_s += times
    state.p99s_s.append(percentile(times, 99))
    return statistics.median(times)


def compare(results: Results, case: Case, effort: Effort, folder: Path) -> None:
    none, some = State(), State()
    with pool_process(folder, case.gpus, "normal") as (port, pid), crowd(port) as pages:
        fill(port, case)
        lease = PoolLease(port, {**who_asks(), **case.wishes})

        def with_pages() -> float:
            pages.open(effort.pages)
            median_s = measure(lease, pid, effort.seconds, some)
            some.polls += pages.close()
            return median_s

        measure(lease, pid, effort.seconds / 2, State())
        contenders = {"no page": lambda: measure(lease, pid, effort.seconds, none), "pages": with_pages}
        medians = in_turn(contenders, effort.rounds)
    rows: list[list[Cell]] = []
    for name, state, of_rounds in (
        ("no page", none, medians["no page"]),
        (f"{effort.pages} pages", some, medians["pages"]),
    ):
        rows.append(
            [
                name,
                duration(statistics.median(of_rounds)),
                spread_s(of_rounds),
                duration(statistics.median(state.p99s_s)),
                spread_s(state.p99s_s),
                len(state.latencies_s),
                statistics.median(state.cpu),
                1000 * statistics.median(state.waited),
                state.polls / (effort.rounds * effort.seconds),
            ]
        )
    p99_ratios = ratios(some.p99s_s, none.p99s_s)
    results.table(
        f"Lease + release, one client, {case.name}; {effort.rounds} alternating rounds of {effort.seconds:g} s",
        [
            "",
            "median",
            "rounds",
            "p99",
            "rounds",
            "leases",
            "server's CPU, s a second",
            "server waited for a processor, ms a second",
            "polls a second",
        ],
        rows,
        note=(
            f"With pages, relative to without: median {median_ratio(medians['pages'], medians['no page']):.2f} x "
            f"(rounds: {spread(ratios(medians['pages'], medians['no page']))}), "
            f"p99 {statistics.median(p99_ratios):.2f} x (rounds: {spread(p99_ratios)})."
        ),
    )
    waits = " and ".join(duration(statistics.median(state.waited)) for state in (none, some))
    ratio(
        results,
        "pages_p99",
        f"p99 of a lease + release with {effort.pages} open pages, relative to none, {case.name}",
        some.p99s_s,
        none.p99s_s,
        most=MOST,
        spread=f"medians: {show(median_ratio(medians['pages'], medians['no page']))} x; the server waited for a processor for "
        f"{waits} in each second",
        why=f"not known; probably the pages and their process share the processors: the server used {show(statistics.median(some.cpu))} s a second, "
        f"without pages {show(statistics.median(none.cpu))} s",
    )


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    results = Results("pages", "How much open pages slow leases down.")
    with tempfile.TemporaryDirectory(prefix="page-benchmark-") as name:
        compare(results, FEWER if options.quick else LARGE, effort, Path(name))
    results.finish(options)


if __name__ == "__main__":
    main()
