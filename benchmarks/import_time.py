"""How long a fresh process takes to import the client, compared with `import aiohttp` and a bare python, in turn in one run.

The client loads asyncio when it is started and not before. So the time until it is ready to call has a row of its own.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.shared.results import Cell, Results, duration, parser
from benchmarks.shared.rounds import in_turn, median_ratio, ratios, spread, spread_s

ROOT = Path(__file__).parent.parent
BARE, ASYNCIO, AIOHTTP = "bare python", "import asyncio", "import aiohttp"
CLIENT = "... and make a client"
FIRST_USE = "... and be ready for the first call"
READY = """
import asyncio
from gpu_worker_pool import GPUWorkerPoolClient
from gpu_worker_pool.client.http.transport import Transport
async def open_and_close():
    transport = Transport()
    await transport.open()
    await transport.close()
GPUWorkerPoolClient()
asyncio.run(open_and_close())
"""
PROGRAMS = {
    BARE: "pass",
    ASYNCIO: "import asyncio",
    AIOHTTP: "import aiohttp",
    "import gpu_worker_pool": "import gpu_worker_pool",
    "import gpu_worker_pool.client": "import gpu_worker_pool.client",
    CLIENT: "from gpu_worker_pool import GPUWorkerPoolClient; GPUWorkerPoolClient()",
    FIRST_USE: READY,
    "... and GPUWorkerPool": "from gpu_worker_pool import GPUWorkerPool; GPUWorkerPool()",
}
QUICK = (BARE, ASYNCIO, AIOHTTP, CLIENT, FIRST_USE)
MOST_MS = 60.0
SERVERS_ONLY = ("fastapi", "uvicorn", "pynvml")


def run(program: str, cpu_s: list[float]) -> float:
    """Return how long a fresh process takes to run a program, and add its processor time to the list."""
    began, used_s = time.perf_counter(), children_cpu_s()
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    cpu_s.append(children_cpu_s() - used_s)
    return time.perf_counter() - began


def children_cpu_s() -> float:
    """Return the processor time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def what_is_loaded(program: str) -> set[str]:
    """Return the modules that a program has loaded."""
    program += "\nimport json, sys; print(json.dumps(list(sys.modules)))"
    return set(json.loads(subprocess.check_output([sys.executable, "-c", program], cwd=ROOT)))


def main() -> None:
    options = parser(__doc__).parse_args()
    results = Results("import_time", "How long a fresh process takes to import the client.")
    programs = {name: PROGRAMS[name] for name in (QUICK if options.quick else PROGRAMS)}
    rounds = 1 if options.quick else 12
    loaded = what_is_loaded(PROGRAMS[CLIENT])
    loaded_in_use = what_is_loaded(PROGRAMS[FIRST_USE])
    if not options.quick:
        for program in programs.values():
            run(program, [])  # compiled, and in the page cache
    cpu_s: dict[str, list[float]] = {name: [] for name in programs}
    times = in_turn({name: partial(run, program, cpu_s[name]) for name, program in programs.items()}, rounds)
    above = {
        name: [mine - bare for mine, bare in zip(found, times[BARE], strict=True)] for name, found in times.items()
    }
    rows: list[list[Cell]] = [
        [
            name,
            duration(statistics.median(times[name])),
            spread_s(times[name]),
            duration(statistics.median(above[name])) if name != BARE else None,
            duration(statistics.median(cpu_s[name])),
            statistics.median(ratios(above[name], above[AIOHTTP])) if name != BARE else None,
        ]
        for name in programs
    ]
    results.table(
        f"A fresh process that does this and ends, medians of {rounds} alternating rounds",
        ["", "total", "rounds", "above bare python", "total processor time", "relative to import aiohttp"],
        rows,
        note=f"{FIRST_USE}: import, make a client, load asyncio and open the transport of calls, as the client's start does; "
        "no call is made.",
    )
    first_use_ms = [1000 * found for found in above[FIRST_USE]]
    above_ms = [1000 * found for found in above[CLIENT]]
    results.figure(
        "import_time",
        "import of the client, and making one, above a bare python"
        f"{'' if 'asyncio' in loaded else '; without asyncio, which it loads when it is started'}",
        value=statistics.median(above_ms),
        unit="ms",
        target=f"<= {MOST_MS:.0f} ms",
        is_met=statistics.median(above_ms) <= MOST_MS,
        spread=f"rounds: {spread(above_ms)}, and {spread(first_use_ms)} with asyncio",
        shown=f"{statistics.median(above_ms):.1f} ms; with asyncio, ready for the first call: {statistics.median(first_use_ms):.1f} ms",
        why=f"the import of asyncio alone would take {median_ratio(above[ASYNCIO], above[CLIENT]):.1f} times as long",
    )
    heavy = sorted((loaded | loaded_in_use).intersection(SERVERS_ONLY))
    results.figure(
        "import_weight",
        f"how many of {', '.join(SERVERS_ONLY)} the client imports until it is ready for the first call",
        value=len(heavy),
        unit="",
        target="0",
        is_met=not heavy,
        why=f"imported: {', '.join(heavy)}",
    )
    results.finish(options)


if __name__ == "__main__":
    main()
