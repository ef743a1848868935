"""What a task costs in GPUExecutor, beside ProcessPoolExecutor and Ray's tasks: they take turns in one run.

The tasks do nothing, so what is measured is the way there and back. ProcessPoolExecutor spawns its processes, as GPUExecutor
does, and hands out no GPUs. Ray's tasks have `num_gpus=1`, in processes that it uses again (max_calls=0).
"""

from __future__ import annotations

import multiprocessing
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import peers
from benchmarks.contenders import servers
from benchmarks.shared.results import Cell, Results, duration, parser
from benchmarks.shared.rounds import in_turn, median_ratio, spread_s
from gpu_worker_pool import GPUExecutor
from gpu_worker_pool.testing import ServerProcess

OURS, THEIRS, RAY = "GPUExecutor", "ProcessPoolExecutor (spawn)", "Ray task, max_calls=0"
WORKERS: Final = 2
ROUNDS, QUICK_ROUNDS = 3, 1
ONE_BY_ONE, QUICK_ONE_BY_ONE = 500, 20
AT_ONCE, QUICK_AT_ONCE = 2000, 40
RAY_DRIVER: Final = """
import sys, time, ray
ray.init(address=sys.argv[1], _temp_dir=sys.argv[2], log_to_driver=False, logging_level="ERROR")
@ray.remote(num_gpus=1, num_cpus=0, max_calls=0)
def nothing(number):
    return abs(number)
ray.get([nothing.remote(-1) for _ in range(50)])
print("ready", flush=True)
for line in sys.stdin:
    way, number = line.split()
    began = time.perf_counter()
    if way == "one":
        for _ in range(int(number)):
            ray.get(nothing.remote(-1))
    else:
        ray.get([nothing.remote(-1) for _ in range(int(number))])
    print((time.perf_counter() - began) / int(number), flush=True)
"""

Measure = Callable[[str, int], float]


def by_executor(executor: Executor, way: str, number: int) -> float:
    """Return the seconds for each of so many tasks, one after the other or all at once."""
    began = time.perf_counter()
    if way == "one":
        for _ in range(number):
            executor.submit(abs, -1).result()
    else:
        for _ in executor.map(abs, range(number)):
            pass
    return (time.perf_counter() - began) / number


@contextmanager
def ray_driver() -> Iterator[Measure]:
    """Run a node of Ray and a driver of it, which measures what it is told to."""
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.ray(Path(folder) / "ray", WORKERS) as serving,
        subprocess.Popen(
            [*serving.python, "-c", RAY_DRIVER, str(serving.settings["address"]), str(serving.settings["folder"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as driver,
    ):
        assert driver.stdin is not None
        assert driver.stdout is not None
        asks, answers = driver.stdin, driver.stdout
        assert answers.readline().strip() == "ready"

        def measure(way: str, number: int) -> float:
            asks.write(f"{way} {number}\n")
            asks.flush()
            return float(answers.readline())

        try:
            yield measure
        finally:
            asks.close()
            driver.wait(timeout=30)


def first_result(make: Callable[[], Executor]) -> float:
    """Return the seconds from making an executor to its first result."""
    began = time.perf_counter()
    with make() as executor:
        executor.submit(abs, -1).result()
        return time.perf_counter() - began


def main() -> None:
    options = parser(__doc__).parse_args()
    results = Results("executors", "What a task costs in GPUExecutor, beside ProcessPoolExecutor and Ray.")
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    numbers = {
        "one": QUICK_ONE_BY_ONE if options.quick else ONE_BY_ONE,
        "many": QUICK_AT_ONCE if options.quick else AT_ONCE,
    }
    spawned = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess({"SIMULATED_GPUS": str(2 * WORKERS)}))
        makers: dict[str, Callable[[], Executor]] = {
            # The others have their turns meanwhile, and it is to keep its leases.
            OURS: partial(GPUExecutor, WORKERS, service_endpoint=server.url, idle_release_s=1000.0),
            THEIRS: partial(ProcessPoolExecutor, WORKERS, spawned),
        }
        measures: dict[str, Measure] = {}
        for name, make in makers.items():
            executor = stack.enter_context(make())
            list(executor.map(abs, range(50)))
            measures[name] = partial(by_executor, executor)
        if options.quick:
            results.skip(RAY, "its node takes long to start, and this is a quick run")
        else:
            try:
                measures[RAY] = stack.enter_context(ray_driver())
                results.note(f"Peers: {peers.version_of('ray', peers.python_with('ray'))}.")
            except peers.MissingError as missing:
                results.skip(RAY, str(missing))
        for way, title in (("one", "one after the other"), ("many", "all submitted at once")):
            times = in_turn({name: partial(run, way, numbers[way]) for name, run in measures.items()}, rounds)
            results.table(
                f"A task that does nothing, {numbers[way]} of them {title}, {WORKERS} workers, medians of {rounds} rounds",
                ["", "for each task", "rounds", "relative to ProcessPoolExecutor"],
                [_row(name, found, times[THEIRS]) for name, found in times.items()],
            )
    with ServerProcess({"SIMULATED_GPUS": str(WORKERS)}) as server:
        makers[OURS] = partial(GPUExecutor, WORKERS, service_endpoint=server.url)
        times = in_turn({name: partial(first_result, make) for name, make in makers.items()}, rounds)
    results.table(
        f"From making an executor to its first result, medians of {rounds} rounds",
        ["", "time", "rounds", "relative to ProcessPoolExecutor"],
        [_row(name, found, times[THEIRS]) for name, found in times.items()],
        note="GPUExecutor asks a server for a GPU meanwhile, and starts a guard for its worker.",
    )
    results.finish(options)


def _row(name: str, times: list[float], theirs: list[float]) -> list[Cell]:
    return [name, duration(statistics.median(times)), spread_s(times), median_ratio(times, theirs)]


if __name__ == "__main__":
    main()
