"""Replay a trace of a real GPU cluster through the core, in simulated time.

    python -m benchmarks.replay --openb FOLDER

The trace is Alibaba's OpenB 2023; openb.py describes its files and how they are used. There are two experiments:

- sampled: tasks are drawn until they ask for 130 % of all GPUs. They come one by one, and none ends. How much of the GPUs
  can be allocated? A task that cannot be served at once goes away again, so the placement alone decides.
- timed: the trace in its own time, with tasks that end, on a hundredth of its nodes, which have 48 GPUs. How long do tasks wait?
  No task declares a time limit.

The result depends on the trace and on the rules, and not on the machine.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from math import inf
from pathlib import Path

from benchmarks.figures import Results, alone, parser
from benchmarks.replay.openb import NoTraceError, Task, Trace, read_trace, sample_nodes, sample_tasks
from benchmarks.replay.pool import SimulatedPool
from gpu_worker_pool.core.model.bounds import MAX_TTL_S

DEMAND = 1.3
SEEDS = (1, 2)
FEW, FEW_SEED = 0.01, 1
RENEW_EVERY_S = MAX_TTL_S / 3
# A quick run replays only the first tasks.
QUICK_NODES, QUICK_TASKS = 0.05, 300


def allocated_percent(trace: Trace, tasks: Sequence[Task]) -> float:
    """Let these tasks come one after the other, and none end; return how much of the GPUs is allocated then."""
    pool = SimulatedPool(trace.nodes)
    for number, task in enumerate(tasks):
        lease_id, now = f"task-{number}", float(number)
        if lease_id not in pool.ask(lease_id, task, now):
            pool.leave(lease_id, now)
    return 100 * pool.allocated_milli / pool.capacity_milli


class TimedRun:
    """A trace in its own time; every task runs for as long as it did there. `waits_s` has each task that was served."""

    def __init__(self, trace: Trace) -> None:
        self._tasks = trace.tasks
        self._pool = SimulatedPool(trace.nodes)
        self._ends: list[tuple[float, int]] = []
        self._renewed_at = 0.0
        self.waits_s: dict[int, float] = {}

    def run(self) -> None:
        arrivals = deque(range(len(self._tasks)))
        now = -inf
        while arrivals or self._ends:
            arrives_at = self._tasks[arrivals[0]].created_at if arrivals else inf
            ends_at = self._ends[0][0] if self._ends else inf
            now = max(now, min(arrives_at, ends_at, self._pool.state.next_due_at()))
            self._renew_until(now)
            if ends_at <= now:
                self._began(self._pool.leave(f"task-{heapq.heappop(self._ends)[1]}", now), now)
            elif arrives_at <= now:
                number = arrivals.popleft()
                self._began(self._pool.ask(f"task-{number}", self._tasks[number], now), now)
            else:
                self._began(self._pool.pass_time(now), now)

    def mean_wait_s(self, *, only_wide: bool = False) -> float | None:
        """Return the mean wait of all tasks that were served, or of those that ask for many GPUs; None if there is none."""
        waits_s = [wait_s for number, wait_s in self.waits_s.items() if self._tasks[number].is_wide or not only_wide]
        return statistics.fmean(waits_s) if waits_s else None

    def _began(self, lease_ids: Sequence[str], now: float) -> None:
        for lease_id in lease_ids:
            number = int(lease_id.removeprefix("task-"))
            self.waits_s[number] = now - self._tasks[number].created_at
            heapq.heappush(self._ends, (now + self._tasks[number].duration_s, number))

    def _renew_until(self, now: float) -> None:
        while self._renewed_at + RENEW_EVERY_S <= now:
            self._renewed_at += RENEW_EVERY_S
            self._pool.renew(self._renewed_at)


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--openb", type=Path, required=True, metavar="FOLDER", help="the folder of the trace")
    options = options_of.parse_args()
    try:
        trace = read_trace(options.openb)
    except NoTraceError as error:
        options_of.error(str(error))
    if options.quick:
        trace = sample_nodes(Trace(trace.nodes, trace.tasks[:QUICK_TASKS]), QUICK_NODES, FEW_SEED)
    results = Results("replay")
    seeds = SEEDS[:1] if options.quick else SEEDS
    allocated = [allocated_percent(trace, sample_tasks(trace, DEMAND, seed)) for seed in seeds]
    results.add("allocation", alone(allocated, "%"))
    timed = TimedRun(trace if options.quick else sample_nodes(trace, FEW, FEW_SEED))
    timed.run()
    for figure_id, only_wide in (("wait_all", False), ("wait_wide", True)):
        if (wait_s := timed.mean_wait_s(only_wide=only_wide)) is None:
            results.leave_out(figure_id, "no such task of the trace was served")
        else:
            results.add(figure_id, alone([wait_s], "s"))
    results.finish(options)


if __name__ == "__main__":
    main()
