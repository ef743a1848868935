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
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_worker_pool.core.model.request import Wishes, matches_model

GPU_MILLI = 1000
MB_PER_MILLI = 16
GPU_MB = GPU_MILLI * MB_PER_MILLI
LEAST_DURATION_S = 1.0


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
    nodes: tuple[Node, ...]
    tasks: tuple[Task, ...]
    without_gpu: int
    not_askable: int

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def capacity_milli(self) -> int:
        return self.gpus * GPU_MILLI


def read_trace(nodes_csv: Path, pods_csv: Path) -> Trace:
    """Read the whole trace, with the tasks in the order of their arrival."""
    with nodes_csv.open(newline="", encoding="utf-8") as file:
        nodes = tuple(Node(row["sn"], int(row["gpu"]), row["model"]) for row in csv.DictReader(file))
    nodes = tuple(node for node in nodes if node.gpus)
    models = frozenset(node.model for node in nodes)
    tasks: list[Task] = []
    without_gpu = not_askable = 0
    with pods_csv.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not int(row["num_gpu"]):
                without_gpu += 1
            elif (task := _task(row, models)) is None:
                not_askable += 1
            else:
                tasks.append(task)
    return Trace(nodes, tuple(sorted(tasks, key=lambda task: (task.created_at, task.name))), without_gpu, not_askable)


def _task(row: dict[str, str], models: frozenset[str]) -> Task | None:
    wanted = tuple(sorted(filter(None, row["gpu_spec"].split("|"))))
    model = model_pattern(wanted, models)
    if wanted and model is None:
        return None
    gpus, gpu_milli = int(row["num_gpu"]), min(int(row["gpu_milli"]), GPU_MILLI)
    memory_mb = None if gpu_milli == GPU_MILLI else float(gpu_milli * MB_PER_MILLI)
    created_at = float(row["creation_time"])
    began_at = float(row["scheduled_time"] or created_at)
    duration_s = max(float(row["deletion_time"]) - began_at, LEAST_DURATION_S)
    wishes = Wishes(gpus, memory_mb, model)
    return Task(row["name"], gpus, gpu_milli, wanted, wishes, created_at, duration_s, bool(row["scheduled_time"]))


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
    return Trace(nodes, trace.tasks, trace.without_gpu, trace.not_askable)


def cut(trace: Trace, nodes: int, tasks: int, seed: int) -> Trace:
    """Return the trace with at most this many nodes and tasks, chosen at random and kept in their order."""
    rng = random.Random(seed)
    kept = sorted(rng.sample(range(len(trace.tasks)), min(tasks, len(trace.tasks))))
    smaller = sample_nodes(trace, min(1.0, nodes / len(trace.nodes)), seed)
    return Trace(smaller.nodes, tuple(trace.tasks[number] for number in kept), trace.without_gpu, trace.not_askable)


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
