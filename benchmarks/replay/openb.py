"""The trace that benchmarks/replay replays, in the CSV format of Alibaba's OpenB 2023: one file of nodes, one of tasks.

The pool manages GPUs and nothing else, so the trace is used like this:

- Every GPU has `GPU_MB` of memory. The trace asks for thousandths of a GPU of any model, and the pool for megabytes. So a
  thousandth is the same number of megabytes everywhere.
- A task with 1000 thousandths of one or more GPUs asks for exclusive GPUs, any other task for that share of the memory. CPUs
  and memory of the node are ignored.
- `gpu_spec` (`V100M16|V100M32`) becomes a pattern for the model. If it names several models, the pattern is their common
  prefix (`V100M*`). If they have none, or if the pattern matches other models too, the task is left out and counted.
- A task without a GPU does not concern the pool. It is left out and counted.
- A task runs from its grant for as long as it ran in the trace: from `scheduled_time` to `deletion_time`. A task that was
  never scheduled runs for the time from `creation_time` to `deletion_time`. Each runs for at least 1 s.
- No file of the trace names owners. The tasks are spread over `OWNERS` owners by a hash of their names.

There are several lists of tasks. Without a column `gpu_spec`, no task names a model. Without the times, tasks can only be
drawn at random: none is replayed in its own time. A task that alone has no times is left out and counted.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from zlib import crc32

from gpu_worker_pool.core.model.request import Wishes, matches_model

GPU_MILLI = 1000
MB_PER_MILLI = 16
GPU_MB = GPU_MILLI * MB_PER_MILLI
LEAST_DURATION_S = 1.0
OWNERS = 8
NEEDED = ("num_gpu", "gpu_milli")
MODELS, TIMES, SCHEDULED = "gpu_spec", ("creation_time", "deletion_time"), "scheduled_time"


class NoTraceError(Exception):
    """A file is not a list of nodes or of tasks; the text says why."""


@dataclass(frozen=True)
class Node:
    name: str
    gpus: int
    model: str


@dataclass(frozen=True)
class Task:
    """A task that asks for GPUs."""

    name: str
    gpus: int
    gpu_milli: int
    models: tuple[str, ...]
    wishes: Wishes
    created_at: float
    duration_s: float
    was_scheduled: bool
    owner: str | None = None
    time_limit_s: float | None = None

    @property
    def milli(self) -> int:
        """All that it asks for, in thousandths of a GPU."""
        return self.gpus * self.gpu_milli

    @property
    def size(self) -> str:
        """The size of its request, for the tables."""
        if self.gpu_milli < GPU_MILLI:
            return "share of a GPU"
        return "1 GPU" if self.gpus == 1 else "2-4 GPUs" if self.gpus <= 4 else "5 and more GPUs"


SIZES = ("share of a GPU", "1 GPU", "2-4 GPUs", "5 and more GPUs")


@dataclass(frozen=True)
class Trace:
    """`lacks` are the columns that the list of tasks does not have."""

    nodes: tuple[Node, ...]
    tasks: tuple[Task, ...]
    without_gpu: int = 0
    not_askable: int = 0
    without_times: int = 0
    lacks: frozenset[str] = frozenset()

    @property
    def has_times(self) -> bool:
        return self.lacks.isdisjoint(TIMES)

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def asked_milli_s(self) -> float:
        """All that its tasks ask for, in thousandths of a GPU times seconds."""
        return sum(task.milli * task.duration_s for task in self.tasks)

    @property
    def capacity_milli(self) -> int:
        return self.gpus * GPU_MILLI


def read_trace(nodes_csv: Path, pods_csv: Path) -> Trace:
    """Read the whole trace, with the tasks in the order of their arrival; without times, in that of the file."""
    nodes = tuple(Node(row["sn"], int(row["gpu"]), row["model"]) for row in _rows(nodes_csv, ("sn", "gpu", "model")))
    nodes = tuple(node for node in nodes if node.gpus)
    models = frozenset(node.model for node in nodes)
    rows = _rows(pods_csv, NEEDED)
    lacks = frozenset({MODELS, *TIMES, SCHEDULED} - rows[0].keys())
    empty = dict.fromkeys(lacks, "")
    tasks: list[Task] = []
    without_gpu = not_askable = without_times = 0
    for number, row in enumerate(rows):
        task = _task(row | empty | {"name": row.get("name") or f"task-{number}"}, models, lacks, number)
        if not int(row["num_gpu"]):
            without_gpu += 1
        elif task is None:
            not_askable += 1
        elif lacks.isdisjoint(TIMES) and not all(row[name] for name in TIMES):
            without_times += 1
        else:
            tasks.append(task)
    if not tasks:
        raise NoTraceError(f"{pods_csv.name} has no task that asks for GPUs")
    return Trace(nodes, in_order(tasks), without_gpu, not_askable, without_times, lacks)


def in_order(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Return the tasks in the order of their arrival."""
    return tuple(sorted(tasks, key=lambda task: (task.created_at, task.name)))


def _rows(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in needed if name not in (reader.fieldnames or ())]:
            raise NoTraceError(
                f"{path.name} has no column {' and no column '.join(missing)}; it has {reader.fieldnames}"
            )
        rows = list(reader)
    if not rows:
        raise NoTraceError(f"{path.name} has no rows")
    return rows


def _task(row: dict[str, str], models: frozenset[str], lacks: frozenset[str], number: int) -> Task | None:
    wanted = tuple(sorted(filter(None, row[MODELS].split("|"))))
    model = model_pattern(wanted, models)
    if wanted and model is None:
        return None
    gpus, gpu_milli = max(int(row["num_gpu"]), 1), min(int(row["gpu_milli"]), GPU_MILLI)
    memory_mb = None if gpu_milli == GPU_MILLI else float(max(gpu_milli, 1) * MB_PER_MILLI)
    # Without times, tasks come one by one, and none ends.
    created_at = float(row["creation_time"] or number)
    began_at = float(row[SCHEDULED] or created_at)
    duration_s = max(float(row["deletion_time"] or began_at) - began_at, LEAST_DURATION_S)
    was_scheduled = bool(row[SCHEDULED]) or SCHEDULED in lacks
    wishes = Wishes(gpus, memory_mb, model)
    owner = row.get("owner") or owner_of(row["name"])
    return Task(row["name"], gpus, gpu_milli, wanted, wishes, created_at, duration_s, was_scheduled, owner)


def owner_of(name: str) -> str:
    """Return one of a few owners, always the same for a task."""
    return f"owner-{crc32(name.encode()) % OWNERS}"


def model_pattern(wanted: Sequence[str], models: frozenset[str]) -> str | None:
    """Return the pattern that asks the pool for one of these models; None if there is none, or if no model is named."""
    if not wanted:
        return None
    shared = max(n for n in range(len(wanted[0]) + 1) if all(name.startswith(wanted[0][:n]) for name in wanted))
    pattern = wanted[0] if len(wanted) == 1 else f"{wanted[0][:shared]}*"
    let_in = {model for model in models if matches_model(pattern, model)}
    return pattern if let_in <= set(wanted) else None


def sample_nodes(trace: Trace, fraction: float, seed: int) -> Trace:
    """Return the trace on a fraction of its nodes, chosen at random."""
    count = max(1, round(len(trace.nodes) * fraction))
    chosen = set(random.Random(seed).sample(range(len(trace.nodes)), count))
    nodes = tuple(node for number, node in enumerate(trace.nodes) if number in chosen)
    return replace(trace, nodes=nodes)


def few_nodes(trace: Trace, gpus: int, seed: int) -> Trace:
    """Return the trace on nodes that have so many GPUs, chosen at random."""
    nodes = list(trace.nodes)
    random.Random(seed).shuffle(nodes)
    sums = accumulate(node.gpus for node in nodes)
    count = 1 + sum(so_far < gpus for so_far in sums)
    return replace(trace, nodes=tuple(sorted(nodes[:count], key=lambda node: node.name)))


def cut(trace: Trace, nodes: int, tasks: int, seed: int) -> Trace:
    """Return the trace with at most this many nodes and tasks, chosen at random and kept in their order."""
    rng = random.Random(seed)
    kept = sorted(rng.sample(range(len(trace.tasks)), min(tasks, len(trace.tasks))))
    smaller = sample_nodes(trace, min(1.0, nodes / len(trace.nodes)), seed)
    return replace(smaller, tasks=tuple(trace.tasks[number] for number in kept))


def sample_tasks(trace: Trace, demand: float, seed: int) -> list[Task]:
    """Draw tasks with replacement until they ask for `demand` times the capacity."""
    rng = random.Random(seed)
    wanted_milli = demand * trace.capacity_milli
    drawn: list[Task] = []
    sum_milli = 0
    while sum_milli < wanted_milli:
        drawn.append(rng.choice(trace.tasks))
        sum_milli += drawn[-1].milli
    return drawn
