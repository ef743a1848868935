"""How many short commands a second run on 8 GPUs: `batch` and `submit --array` beside HyperQueue and `ts`, in one run.

One sweep is 1,000 x `true`, the other 1,000 commands that last 50 ms. HyperQueue gets a sweep as one job with a task for each command,
on 8 cores that stand for the GPUs. `ts` is told each command by a call of its own, because it has no other way.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.contenders.contender import Command, serving
from benchmarks.contenders.pool import PoolQueue
from benchmarks.figures import Results, compare, in_turn, parser
from benchmarks.peers import MissingError

GPUS = 8
JOBS, QUICK_JOBS = 1_000, 20
ROUNDS, QUICK_ROUNDS = 3, 1
# After this time no other round of a sweep begins.
BUDGET_S = 40.0
SWEEPS = {"true": ("true",), "50ms": ("sleep", "0.05")}
HYPERQUEUE, SPOOLER = "HyperQueue", "ts"
RunAll = Callable[[Sequence[Command]], None]


def jobs_a_second(run_all: RunAll, command: Command, jobs: int) -> float:
    """Return how many of these jobs ran a second, from when they are handed in until all have ended."""
    began = time.monotonic()
    run_all([command] * jobs)
    return jobs / (time.monotonic() - began)


def main() -> None:
    options = parser(__doc__).parse_args()
    jobs, rounds = (QUICK_JOBS, QUICK_ROUNDS) if options.quick else (JOBS, ROUNDS)
    results = Results("sweep")
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        ours = held.enter_context(serving("pool", folder / "pool", GPUS)).queue
        assert isinstance(ours, PoolQueue)
        ways: dict[str, RunAll] = {"batch": ours.run_all, "array": ours.run_array}
        for shown, module in ((HYPERQUEUE, "hyperqueue"), (SPOOLER, "task_spooler")):
            try:
                queue = held.enter_context(serving(module, folder / module, GPUS)).queue
            except (MissingError, OSError, RuntimeError) as error:
                results.leave_out(shown, str(error))
            else:
                assert queue is not None
                ways[shown] = queue.run_all
        for sweep, command in SWEEPS.items():
            wanted = {name: way for name, way in ways.items() if (name, sweep) != (SPOOLER, "50ms")}
            found = in_turn(
                {name: lambda way=way: jobs_a_second(way, command, jobs) for name, way in wanted.items()},  # type: ignore[misc]  # noqa: B023
                rounds,
                BUDGET_S,
            )
            add(results, sweep, found)
    results.finish(options)


def add(results: Results, sweep: str, found: dict[str, list[float]]) -> None:
    """Add the figures of one sweep: `batch` and `submit --array` beside HyperQueue, and `batch` beside `ts`."""
    for ours, other, ending in (("batch", HYPERQUEUE, ""), ("array", HYPERQUEUE, ""), ("batch", SPOOLER, "_ts")):
        if ours in found and other in found:
            results.add(f"{ours}_{sweep}{ending}", compare(found[ours], found[other], "a second", other))


if __name__ == "__main__":
    main()
