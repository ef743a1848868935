"""Which tasks of a trace declare a time limit, and how well it fits."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass, replace

from benchmarks.replay.openb import Trace
from gpu_worker_pool.core.model.request import MAX_TIME_LIMIT_S

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
# The limits that people choose.
USUAL_S = (
    *(minutes * 60.0 for minutes in (15, 30)),
    *(hours * HOUR_S for hours in (1, 2, 4, 8, 12, 24)),
    *(days * DAY_S for days in (2, 7, 14, 30, 60, 120, 180)),
    MAX_TIME_LIMIT_S,
)


@dataclass(frozen=True)
class Declared:
    """The share of the tasks that declare a limit: as long as they run, or the next usual limit."""

    name: str
    share: float
    is_rounded: bool = False


NOBODY = Declared("nobody declares", 0.0)
ALL_EXACT = Declared("all declare, exact", 1.0)
VARIANTS = (
    NOBODY,
    Declared("half declare, exact", 0.5),
    Declared("half declare, rounded up", 0.5, is_rounded=True),
    ALL_EXACT,
    Declared("all declare, rounded up", 1.0, is_rounded=True),
)
DECLARED = {variant.name: variant for variant in VARIANTS}


def declare(trace: Trace, declared: Declared, seed: int) -> Trace:
    """Return the trace with the limits that its tasks declare."""
    rng = random.Random(seed)
    declares = [rng.random() < declared.share for _ in trace.tasks]
    tasks = (
        replace(task, time_limit_s=rounded_up(task.duration_s) if declared.is_rounded else task.duration_s)
        if does
        else task
        for task, does in zip(trace.tasks, declares, strict=True)
    )
    return replace(trace, tasks=tuple(tasks))


def rounded_up(duration_s: float) -> float:
    """Return the shortest usual limit that is long enough."""
    return USUAL_S[bisect_left(USUAL_S, duration_s)]
