"""What open pages cost the leases: lease + release of one client with 50 pages open, beside the same with none.

The server, the client and the pages are three processes on this machine. Rounds with and without pages alternate, and
what counts is the ratio of rounds that follow each other: the times are those of this machine, on this day. It stops by
itself.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lease_locks import PoolLease, who_asks
from lease_servers import pool_process

PAGES = 50
# Until what was opened or closed has settled.
SETTLE_S = 0.3


@dataclass(frozen=True)
class Case:
    """A server: its GPUs, what else is there, and what the one who is measured asks for."""

    name: str
    gpus: str
    held: int = 0
    waiting: int = 0
    wishes: dict[str, object] = field(default_factory=dict)


SMALL = Case("8 GPUs, nobody else", "8")
# All but one GPU are held, and very many wait for those.
LARGE = Case("200 GPUs, 500 leases, 300 of them waiting", "200xT4,1xA100-80GB", 200, 300, {"model": "A100"})


@dataclass
class State:
    """What was measured with pages, or without."""

    latencies_s: list[float] = field(default_factory=list)
    medians_s: list[float] = field(default_factory=list)
    p99s_s: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class Crowd:
    """The pages, in a process of their own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def open(self, pages: int) -> None:
        self._tell(f"open {pages}")

    def close(self) -> int:
        """How often the pages looked while they were open."""
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
    command = [sys.executable, str(Path(__file__).with_name("page_crowd.py")), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Crowd(process)
        finally:
            process.terminate()


def fill(port: int, case: Case) -> None:
    """Others who hold GPUs, and who wait for them."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        for number in range(case.held + case.waiting):
            form = {"owner": f"owner-{number % 20}", "worker_id": f"worker-{number}", "model": "T4", "ttl_s": 3600.0}
            form["labels"] = {"command": f"python train.py --seed {number}"}
            connection.request("PUT", f"/leases/other-{number}", json.dumps(form).encode())
            response = connection.getresponse()
            assert response.status == (201 if number < case.held else 202), (number, response.read())
            response.read()


def cpu_s(pid: int) -> float:
    """What the process has used of the processors so far."""
    used = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")


def measure(lease: PoolLease, pid: int, seconds: float, state: State) -> None:
    time.sleep(SETTLE_S)
    times: list[float] = []
    used, began = cpu_s(pid), time.perf_counter()
    while (start := time.perf_counter()) < began + seconds:
        lease.acquire()
        lease.release()
        times.append(time.perf_counter() - start)
    state.cpu.append((cpu_s(pid) - used) / (time.perf_counter() - began))
    state.latencies_s += times
    state.medians_s.append(statistics.median(times))
    state.p99s_s.append(_p99(times))


def compare(case: Case, pages: int, rounds: int, seconds: float, folder: Path) -> None:
    print(f"\nLease + release, one client, {case.name}; {rounds} rounds of {seconds:g} s each way", flush=True)
    none, some = State(), State()
    looks = 0
    with pool_process(folder, case.gpus, "normal") as (port, pid), crowd(port) as pages_there:
        fill(port, case)
        lease = PoolLease(port, {**who_asks(), **case.wishes})
        measure(lease, pid, seconds / 2, State())
        for number in range(rounds):
            # Each is first in every other round, so that neither gains by its place.
            for with_pages in (False, True) if number % 2 else (True, False):
                if with_pages:
                    pages_there.open(pages)
                    measure(lease, pid, seconds, some)
                    looks += pages_there.close()
                else:
                    measure(lease, pid, seconds, none)
    for name, state in (("no page", none), (f"{pages} pages", some)):
        print(
            f"  {name:<10} median {_ms(statistics.median(state.latencies_s))} "
            f"(rounds: {_ms(min(state.medians_s))} to {_ms(max(state.medians_s))}), "
            f"p99 {_ms(_p99(state.latencies_s))} (rounds: {_ms(min(state.p99s_s))} to {_ms(max(state.p99s_s))}), "
            f"{len(state.latencies_s)} leases, server's CPU {statistics.median(state.cpu):.2f} s a second"
        )
    print(f"  the pages looked {looks / (rounds * seconds):.0f} times a second")
    print(f"  with pages / without: median {_ratio(some.medians_s, none.medians_s)}")
    print(f"  with pages / without: p99    {_ratio(some.p99s_s, none.p99s_s)}", flush=True)


def _ratio(some: list[float], none: list[float]) -> str:
    """The median of the rounds' ratios, as those that follow each other share their noise; and how far they lie."""
    ratios = [mine / other for mine, other in zip(some, none, strict=True)]
    return f"{statistics.median(ratios):.2f} x  (rounds: {min(ratios):.2f} to {max(ratios):.2f})"


def _p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) * 99 // 100, len(times) - 1)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few and short rounds, to see that it runs")
    is_quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="page-benchmark-") as name:
        folder = Path(name)
        if is_quick:
            compare(SMALL, 5, 1, 0.3, folder / "small")
            return
        for case, place in ((SMALL, "small"), (LARGE, "large")):
            compare(case, PAGES, 10, 3.0, folder / place)


if __name__ == "__main__":
    main()
