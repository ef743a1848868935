"""How much of what is free is of no use: the measure of "Beware of Fragmentation" (USENIX ATC '23), for GPUs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from benchmarks.replay.openb import Task

# A kind of task: GPUs, thousandths of each, models (none: any), and how much of the work is of that kind.
Kind = tuple[int, int, tuple[str, ...], float]


def kinds_of(tasks: Iterable[Task]) -> tuple[Kind, ...]:
    """The work by kinds of task."""
    counts = Counter((task.gpus, task.gpu_milli, task.models) for task in tasks)
    return tuple((*kind, count / counts.total()) for kind, count in sorted(counts.items()))


@lru_cache(maxsize=200_000)
def fragmented_milli(free_milli: tuple[int, ...], model: str, kinds: tuple[Kind, ...]) -> float:
    """What of a node's free GPU is of no use to a task of this work, on average: all of it where the task does not fit on
    the node, else what is free on GPUs that have too little for it. `free_milli` is sorted, so that nodes alike are one.
    """
    free = sum(free_milli)
    lost = 0.0
    for gpus, milli, models, part in kinds:
        fits = [left for left in free_milli if left >= milli]
        can_run = len(fits) >= gpus and (not models or model in models)
        lost += part * (free - sum(fits) if can_run else free)
    return lost


@lru_cache(maxsize=200_000)
def least_growth(
    free_milli: tuple[int, ...], model: str, gpus: int, milli: int, kinds: tuple[Kind, ...]
) -> tuple[float, int] | None:
    """By how much a node's fragmentation grows with one more task, at best, and what is free now on the GPU to be taken
    for that; None where it does not fit.
    """
    before = fragmented_milli(free_milli, model, kinds)
    found: list[tuple[float, int]] = []
    for left in {left for left in free_milli if left >= milli}:
        if sum(other >= milli for other in free_milli) < gpus:
            continue
        after = list(free_milli)
        # Several are always whole GPUs in this trace, so it does not matter which.
        for _ in range(gpus):
            after.remove(left if left in after else max(after))
        after += [left - milli] * gpus
        found.append((fragmented_milli(tuple(sorted(after)), model, kinds) - before, left))
    return min(found, default=None)
