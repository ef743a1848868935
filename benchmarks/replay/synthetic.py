"""A load that a lab could have: a little more than its GPUs can do, most of it narrow, and a wide request every half hour.

- 6 nodes of 8 GPUs each, one model; all requests are exclusive.
- Every 30 minutes, at the half hour, a request for 8 GPUs.
- The others come at random times (a Poisson process): 75 % ask for 1 GPU, 15 % for 2, 10 % for 4. They are so many that all
  requests together ask for 105 % of the GPU time.
- Every request, wide or not, runs for a log-normal time: median 30 minutes, sigma 1 (so 49 minutes in the mean), at least
  1 minute and at most 24 hours.
- Requests come for 24 hours. The rest is then worked off. So the queue grows by an hour's work or more until the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import exp, log

from benchmarks.replay.openb import GPU_MILLI, Node, Task, Trace, owner_of
from gpu_worker_pool.core.model.request import Wishes

NODES, GPUS_PER_NODE, MODEL = 6, 8, "A100"
LOAD = 1.05
WIDE, WIDE_EVERY_S = 8, 1800.0
WIDTHS, SHARES = (1, 2, 4), (0.75, 0.15, 0.10)
MEDIAN_S, SIGMA = 1800.0, 1.0
LEAST_S, MOST_S = 60.0, 24 * 3600.0
LASTS_S = 24 * 3600.0


@dataclass(frozen=True)
class Load:
    """The size of it; a shorter one for checks."""

    lasts_s: float = LASTS_S


def synthetic(load: Load, seed: int) -> Trace:
    """Return the load as a trace."""
    rng = random.Random(seed)
    nodes = tuple(Node(f"node-{number}", GPUS_PER_NODE, MODEL) for number in range(NODES))
    mean_s = MEDIAN_S * exp(SIGMA**2 / 2)
    mean_width = sum(width * share for width, share in zip(WIDTHS, SHARES, strict=True))
    gpus_for_others = LOAD * NODES * GPUS_PER_NODE - WIDE * mean_s / WIDE_EVERY_S
    per_s = gpus_for_others / (mean_width * mean_s)
    arrivals: list[tuple[float, int]] = []
    at = rng.expovariate(per_s)
    while at < load.lasts_s:
        arrivals.append((at, rng.choices(WIDTHS, SHARES)[0]))
        at += rng.expovariate(per_s)
    arrivals += [(WIDE_EVERY_S * (number + 1), WIDE) for number in range(int(load.lasts_s / WIDE_EVERY_S) - 1)]
    tasks = []
    for number, (created_at, gpus) in enumerate(sorted(arrivals)):
        duration_s = min(max(rng.lognormvariate(log(MEDIAN_S), SIGMA), LEAST_S), MOST_S)
        name = f"task-{number}"
        tasks.append(
            Task(name, gpus, GPU_MILLI, (), Wishes(gpus), created_at, duration_s, was_scheduled=True, owner=owner_of(name))
        )
    return Trace(nodes, tuple(tasks))
