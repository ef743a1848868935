"""How much free capacity is of no use: the measure of "Beware of Fragmentation" (USENIX ATC '23), for GPUs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from benchmarks.replay.openb import Task

# A kind of task: GPUs, thousandths of each, models (none means any), and its share of the work.
Kind = tuple[int, int, tuple[str, ...], float]


def kinds_of(tasks: Iterable[Task]) -> tuple[Kind, ...]:
    """Return the work by kinds of task."""
    counts = Counter((task.gpus, task.gpu_milli, task.models) for task in tasks)
    return tuple((*kind, count / counts.total()) for kind, count in sorted(counts.items()))


@lru_cache(maxsize=200_000)
def fragmented_milli(free_milli: tuple[int, ...], model: str, kinds: tuple[Kind, ...]) -> float:
    """Return how much of a node's free GPU capacity is of no use to a task of this work, on average.

    If the task does not fit on the node, that is all of it; else it is what is free on GPUs that have too little for the
    task. `free_milli` is sorted, so that equal nodes share a cache entry.
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
    """Return by how much one more task adds to a node's fragmentation, at best, and what is free on the GPU to take for it.

    Returns None if the task does not fit.
    """
    before = fragmented_milli(free_milli, model, kinds)
    found: list[tuple[float, int]] = []
    for left in {left for left in free_milli if left >= milli}:
        if sum(other >= milli for other in free_milli) < gpus:
            continue
        after = list(free_milli)
        # In this trace, a task for several GPUs asks for whole ones, so it does not matter which.
        for _ in range(gpus):
            after.remove(left if left in after else max(after))
        after += [left - milli] * gpus
        found.append((fragmented_milli(tuple(sorted(after)), model, kinds) - before, left))
    return min(found, default=None)
