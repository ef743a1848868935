"""The two experiments of benchmarks/replay, each a function of a trace, a policy and a seed."""

from __future__ import annotations

import heapq
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from benchmarks.replay.earlier_rule import HoldingPool
from benchmarks.replay.easy import EasyPool
from benchmarks.replay.fragmentation import kinds_of
from benchmarks.replay.openb import GPU_MILLI, SIZES, Task, Trace, sample_tasks
from benchmarks.replay.policies import Policy, Rule
from benchmarks.replay.pool import SimulatedPool, StrictPool
from gpu_worker_pool.core.model.bounds import MAX_TTL_S
from gpu_worker_pool.core.queue.planner import FreeAt
from gpu_worker_pool.core.queue.start_times import expected_starts

RENEW_EVERY_S = MAX_TTL_S / 3
POINTS = 200
# The first few tasks arrive long before all others; what is allocated until then says nothing.
EARLY_PART = 0.01
# A task that waited more than this many times as long as it ran has starved.
STARVED_TIMES = 10
FRAGMENTATION_EVERY = 100
# How often a waiter that was told nothing asks again when it will start.
ASK_AGAIN_S = 600.0


@dataclass(frozen=True)
class Speed:
    """The processor time of decisions. A decision is one step of the core: a request, a release, a reading or the time that
    passed, with the passes over the queue that follow.
    """

    decisions: int
    all_s: float
    per_s: float
    mean_us: float
    p99_us: float


def speed_of(decisions_s: Sequence[float]) -> Speed:
    in_order = sorted(decisions_s)
    mean_s = statistics.fmean(in_order)
    return Speed(len(in_order), sum(in_order), 1 / mean_s, mean_s * 1e6, quantile(in_order, 0.99) * 1e6)


def quantile(in_order: Sequence[float], part: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return in_order[min(len(in_order) - 1, int(len(in_order) * part))]


def run_sampled(trace: Trace, policy: Policy, demand: float, seed: int) -> dict[str, Any]:
    """Draw tasks until they ask for `demand` times the capacity, and `fill` the pool with them."""
    return fill(trace, sample_tasks(trace, demand, seed), policy, seed)


def fill(trace: Trace, tasks: Sequence[Task], policy: Policy, seed: int) -> dict[str, Any]:
    """Let these tasks come one after the other, and none end.

    A task that cannot be served at once goes away again, like a request with a wait of 0 s. So no queue forms, and the
    placement alone decides.
    """
    pool = pool_of(policy)(trace.nodes, kinds_of(trace.tasks), policy, seed)
    demand = sum(task.milli for task in tasks) / pool.capacity_milli
    asked_milli = served = gone = 0
    first_miss: float | None = None
    series: list[tuple[float, float, float]] = []
    for number, task in enumerate(tasks):
        lease_id, now = f"task-{number}", float(number)
        asked_milli += task.milli
        granted = pool.ask(lease_id, task, now)
        served += len(granted)
        if not granted and first_miss is None:
            first_miss = pool.allocated_milli / pool.capacity_milli
        if lease_id not in granted and lease_id not in pool.refused:
            pool.leave(lease_id, now)
            gone += 1
        if asked_milli / pool.capacity_milli >= (len(series) + 1) * demand / POINTS:
            asked, allocated = asked_milli / pool.capacity_milli, pool.allocated_milli / pool.capacity_milli
            series.append((asked, allocated, pool.fragmented()))
    allocated, fragmented = pool.allocated_milli / pool.capacity_milli, pool.fragmented()
    return {
        "policy": policy.name,
        "seed": seed,
        "demand": demand,
        "tasks": len(tasks),
        "served": served,
        "gone": gone,
        "refused": len(pool.refused),
        "allocated": allocated,
        "allocated_at_first_miss": first_miss,
        "fragmented_of_capacity": fragmented,
        "fragmented_of_free": fragmented / (1 - allocated) if allocated < 1 else 0.0,
        "free_whole_gpus": sum(left == GPU_MILLI for free in pool.free_milli.values() for left in free.values()),
        "speed": asdict(speed_of(pool.decisions_s)),
        "series": {"columns": ["demand", "allocated", "fragmented_of_capacity"], "points": series},
    }


class TimedRun:
    """A trace in its own time; every task runs for as long as it did there.

    With `asks_when` every waiter also asks when it will start, until it is told.
    """

    def __init__(self, trace: Trace, policy: Policy, seed: int, *, asks_when: bool = False) -> None:
        self.tasks = trace.tasks
        self.trace = trace
        self.policy = policy
        self.arrives_at = [task.created_at for task in trace.tasks]
        self.pool = pool_of(policy)(trace.nodes, kinds_of(trace.tasks), policy, seed)
        self.began_at: dict[int, float] = {}
        self.told: dict[int, FreeAt] = {}
        self.moments: list[tuple[float, int, int]] = []
        self.fragmented: list[float] = []
        self._asks_when = asks_when
        self._asked_at = -inf
        self._ends: list[tuple[float, int]] = []
        self._renewed_at = 0.0

    @property
    def refused(self) -> set[int]:
        return {number_of(lease_id) for lease_id in self.pool.refused}

    def run(self) -> None:
        arrivals = deque(range(len(self.tasks)))
        now = -inf
        while arrivals or self._ends:
            arrives_at = self.arrives_at[arrivals[0]] if arrivals else inf
            ends_at = self._ends[0][0] if self._ends else inf
            now = max(now, min(arrives_at, ends_at, self.pool.state.next_due_at()))
            self._renew_until(now)
            if ends_at <= now:
                self._began(self.pool.leave(f"task-{heapq.heappop(self._ends)[1]}", now), now)
            elif arrives_at <= now:
                number = arrivals.popleft()
                self._began(self.pool.ask(f"task-{number}", self.tasks[number], now), now)
            else:
                self._began(self.pool.pass_time(now), now)
            self._ask_when(now, is_arrival=arrives_at <= now)
            self.moments.append((now, self.pool.allocated_milli, self.pool.waiting))
            if self.pool.waiting and len(self.moments) % FRAGMENTATION_EVERY == 0:
                self.fragmented.append(self.pool.fragmented())

    def _began(self, lease_ids: Sequence[str], now: float) -> None:
        for lease_id in lease_ids:
            number = number_of(lease_id)
            self.began_at[number] = now
            heapq.heappush(self._ends, (now + self.tasks[number].duration_s, number))

    def _ask_when(self, now: float, *, is_arrival: bool) -> None:
        if not self._asks_when or not (is_arrival or now >= self._asked_at + ASK_AGAIN_S):
            return
        if all(number_of(lease_id) in self.told for lease_id in self.pool.state.queue):
            return
        self._asked_at = now
        for lease_id, start in expected_starts(self.pool.state, now).items():
            self.told.setdefault(number_of(lease_id), start)

    def _renew_until(self, now: float) -> None:
        while self._renewed_at + RENEW_EVERY_S <= now:
            self._renewed_at += RENEW_EVERY_S
            self.pool.renew(self._renewed_at)

    def waits_s(self, size: str | None = None) -> dict[int, float]:
        """Return how long each served task waited."""
        return {
            number: began_at - self.arrives_at[number]
            for number, began_at in self.began_at.items()
            if size in (None, self.tasks[number].size)
        }


def pool_of(policy: Policy) -> type[SimulatedPool]:
    return {Rule.STRICT: StrictPool, Rule.HOLDS: HoldingPool, Rule.EASY: EasyPool}.get(policy.rule, SimulatedPool)


def number_of(lease_id: str) -> int:
    return int(lease_id.removeprefix("task-"))


def run_timed(trace: Trace, policy: Policy, seed: int, *, asks_when: bool = False) -> dict[str, Any]:
    """Replay a trace that was cut to a few of its nodes before, and sum up what happened."""
    run = TimedRun(trace, policy, seed, asks_when=asks_when)
    run.run()
    capacity = run.pool.capacity_milli
    spans = [
        (later - at, milli / capacity, waiting)
        for (at, milli, waiting), (later, _, _) in zip(run.moments, run.moments[1:], strict=False)
    ]
    crowded_s = sum(span for span, _, waiting in spans if waiting)
    overtaken = _overtaken(run)
    since, until = arriving(run.arrives_at)
    return {
        "policy": policy.name,
        "rule": policy.rule.name,
        "nodes": len(trace.nodes),
        "gpus": trace.gpus,
        "seed": seed,
        "tasks": len(run.tasks),
        "served": len(run.began_at),
        "refused": len(run.refused),
        "never_served": len(run.tasks) - len(run.began_at) - len(run.refused),
        "most_waiting": max(waiting for _, _, waiting in run.moments),
        "peak_allocated": max(milli for _, milli, _ in run.moments) / capacity,
        "mean_allocated_while_they_arrive": _mean_allocated(run, since, until),
        "crowded_s": crowded_s,
        "mean_allocated_while_somebody_waits": (
            sum(span * part for span, part, waiting in spans if waiting) / crowded_s if crowded_s else None
        ),
        "mean_fragmented_while_somebody_waits": statistics.fmean(run.fragmented) if run.fragmented else None,
        "wait_s": _waits(run, None),
        "by_size": {
            size: _waits(run, size) | {"most_overtaken": max((overtaken[n] for n in _of(run.tasks, size)), default=0)}
            for size in SIZES
            if _of(run.tasks, size)
        },
        "backfilled": run.pool.backfilled,
        "told": _told(run) if asks_when else None,
        "speed": asdict(speed_of(run.pool.decisions_s)),
        "wait_cdf": {"columns": ["wait_s", "share_of_tasks"], "points": _cdf(sorted(run.waits_s().values()))},
        "allocation": {"columns": ["at_s", "allocated", "waiting"], "points": _over_time(run, capacity)},
    }


def arriving(arrives_at: Sequence[float]) -> tuple[float, float]:
    """Return the time from when the early few have arrived until the last task has; `arrives_at` is sorted."""
    return quantile(arrives_at, EARLY_PART), arrives_at[-1]


def _mean_allocated(run: TimedRun, since: float, until: float) -> float | None:
    """Return the mean over this time, which is the same for all policies; None if it has no length."""
    milli_s = sum(
        max(0.0, min(later, until) - max(at, since)) * milli
        for (at, milli, _), (later, _, _) in zip(run.moments, run.moments[1:], strict=False)
    )
    return milli_s / run.pool.capacity_milli / (until - since) if until > since else None


def _of(tasks: Sequence[Task], size: str) -> list[int]:
    return [number for number, task in enumerate(tasks) if task.size == size]


def _waits(run: TimedRun, size: str | None) -> dict[str, Any]:
    waits_of = run.waits_s(size)
    if not waits_of:
        return {"served": 0}
    waits_s = sorted(waits_of.values())
    return {
        "served": len(waits_s),
        "waited": sum(wait_s > 0 for wait_s in waits_s),
        "mean": statistics.fmean(waits_s),
        "p50": quantile(waits_s, 0.5),
        "p95": quantile(waits_s, 0.95),
        "p99": quantile(waits_s, 0.99),
        "max": waits_s[-1],
        "starved": sum(wait_s > STARVED_TIMES * run.tasks[number].duration_s for number, wait_s in waits_of.items()),
    }


def _told(run: TimedRun) -> dict[str, Any]:
    """Return how many waiters were told when they will start, and by how much the first date was later than the true one."""
    waited = [number for number, wait_s in run.waits_s().items() if wait_s > 0]
    later_s: dict[str, list[float]] = {}
    for number in waited:
        if number in run.told:
            start = run.told[number]
            later_s.setdefault(str(start.basis), []).append(start.at - run.began_at[number])
    return {"waited": len(waited), "told_later_s": {basis: sorted(values) for basis, values in later_s.items()}}


def _overtaken(run: TimedRun) -> list[int]:
    """Return for each task how many later ones began before it; 0 if it was refused, since it did not wait."""
    counts = [0] * len(run.tasks)
    later: list[float] = []
    for number in reversed(range(len(run.tasks))):
        if number not in run.refused:
            counts[number] = bisect_left(later, run.began_at.get(number, inf))
        if number in run.began_at:
            insort(later, run.began_at[number])
    return counts


def _cdf(waits_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return up to `POINTS` points of the distribution, and a few more towards its end."""
    if not waits_s:
        return []
    parts = sorted({*(n / POINTS for n in range(1, POINTS)), 0.999, 1.0})
    points = {(quantile(waits_s, part), part) for part in parts}
    return sorted(points)


def _over_time(run: TimedRun, capacity: int) -> list[tuple[float, float, int]]:
    """Return the state at evenly spaced steps of the replay, so that busy times have more points."""
    every = max(1, len(run.moments) // POINTS)
    return [(at, milli / capacity, waiting) for at, milli, waiting in run.moments[::every]]
