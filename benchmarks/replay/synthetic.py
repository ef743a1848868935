"""A load that a lab could have: a little more than its GPUs can do, most of it narrow, and a wide request every half hour.

- 6 nodes of 8 GPUs each, one model; all requests are exclusive.
- Every 30 minutes, at the half hour, a request for 8 GPUs.
- Of the others, 70 % ask for 1 GPU, 20 % for 2, 10 % for 4. They are drawn until all requests together ask for 105 % of
  the GPU time, and come at any time with equal chance.
- Every request, wide or not, runs for a log-normal time: median 30 minutes, sigma 1 (so 49 minutes in the mean), at least
  1 minute and at most 24 hours.
- Requests come for 12 hours. The rest is then worked off.

The earlier rule lets all requests wait about as long on this load as on the one that the figures of the design are from,
and the wide ones longer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import log

from benchmarks.replay.openb import GPU_MILLI, Node, Task, Trace, owner_of
from gpu_worker_pool.core.model.request import Wishes

NODES, GPUS_PER_NODE, MODEL = 6, 8, "A100"
LOAD = 1.05
WIDE, WIDE_EVERY_S = 8, 1800.0
WIDTHS, SHARES = (1, 2, 4), (0.70, 0.20, 0.10)
MEDIAN_S, SIGMA = 1800.0, 1.0
LEAST_S, MOST_S = 60.0, 24 * 3600.0
LASTS_S = 12 * 3600.0


@dataclass(frozen=True)
class Load:
    """The size of it; a shorter one for checks."""

    lasts_s: float = LASTS_S


def synthetic(load: Load, seed: int) -> Trace:
    """Return the load as a trace."""
    rng = random.Random(seed)
    nodes = tuple(Node(f"node-{number}", GPUS_PER_NODE, MODEL) for number in range(NODES))
    wide = [(WIDE_EVERY_S * number, WIDE, _duration_s(rng)) for number in range(int(load.lasts_s / WIDE_EVERY_S))]
    asked = [*wide]
    left_s = LOAD * NODES * GPUS_PER_NODE * load.lasts_s - sum(gpus * lasts_s for _, gpus, lasts_s in wide)
    while left_s > 0:
        asked.append((rng.uniform(0.0, load.lasts_s), rng.choices(WIDTHS, SHARES)[0], _duration_s(rng)))
        left_s -= asked[-1][1] * asked[-1][2]
    return Trace(nodes, tuple(_task(number, *one) for number, one in enumerate(sorted(asked))))


def _duration_s(rng: random.Random) -> float:
    return min(max(rng.lognormvariate(log(MEDIAN_S), SIGMA), LEAST_S), MOST_S)


def _task(number: int, created_at: float, gpus: int, duration_s: float) -> Task:
    name = f"task-{number}"
    return Task(
        name, gpus, GPU_MILLI, (), Wishes(gpus), created_at, duration_s, was_scheduled=True, owner=owner_of(name)
    )
