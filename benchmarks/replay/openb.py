"""The trace that is replayed, in the CSV format of Alibaba's OpenB 2023: one file of nodes, one of tasks.

The pool manages GPUs and nothing else, so the trace is used like this:

- Every GPU has `GPU_MB` of memory. The trace asks for thousandths of a GPU of any model, and the pool for megabytes. So a
  thousandth is the same number of megabytes everywhere.
- A task with 1000 thousandths of one or more GPUs asks for exclusive GPUs, any other task for that share of the memory. CPUs
  and memory of the node are ignored.
- `gpu_spec` (`V100M16|V100M32`) becomes a pattern for the model. If it names several models, the pattern is their common
  prefix (`V100M*`). If they have none, or if the pattern matches other models too, the task is left out.
- A task without a GPU or without times is left out.
- A task runs from its grant for as long as it ran in the trace: from `scheduled_time` to `deletion_time`. A task that was
  never scheduled runs for the time from `creation_time` to `deletion_time`. Each runs for at least 1 s.
- No file of the trace names owners. The tasks are spread over `OWNERS` owners by a hash of their names.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

from gpu_worker_pool.core.model.request import Wishes, matches_model

NODES, TASKS = "openb_node_list_gpu_node.csv", "openb_pod_list_default.csv"
NODE_COLUMNS = ("sn", "gpu", "model")
TASK_COLUMNS = ("name", "num_gpu", "gpu_milli", "gpu_spec", "creation_time", "deletion_time", "scheduled_time")
GPU_MILLI = 1000
MB_PER_MILLI = 16
GPU_MB = GPU_MILLI * MB_PER_MILLI
LEAST_DURATION_S = 1.0
OWNERS = 8
WIDE_GPUS = 5


class NoTraceError(Exception):
    """A folder has no such trace; the text says why."""


@dataclass(frozen=True)
class Node:
    name: str
    gpus: int
    model: str


@dataclass(frozen=True)
class Task:
    """A task that asks for GPUs, each with this number of thousandths."""

    name: str
    gpus: int
    gpu_milli: int
    wishes: Wishes
    created_at: float
    duration_s: float

    @property
    def milli(self) -> int:
        """All that it asks for, in thousandths of a GPU."""
        return self.gpus * self.gpu_milli

    @property
    def is_wide(self) -> bool:
        return self.gpus >= WIDE_GPUS

    @property
    def owner(self) -> str:
        """One of a few owners, always the same for a task."""
        return f"owner-{crc32(self.name.encode()) % OWNERS}"


@dataclass(frozen=True)
class Trace:
    """The nodes that have GPUs, and the tasks that ask for them in the order of their arrival."""

    nodes: tuple[Node, ...]
    tasks: tuple[Task, ...]

    @property
    def capacity_milli(self) -> int:
        return sum(node.gpus for node in self.nodes) * GPU_MILLI


def read_trace(folder: Path) -> Trace:
    """Read the whole trace."""
    nodes = tuple(Node(row["sn"], int(row["gpu"]), row["model"]) for row in _rows(folder / NODES, NODE_COLUMNS))
    nodes = tuple(node for node in nodes if node.gpus)
    models = frozenset(node.model for node in nodes)
    tasks = [task for row in _rows(folder / TASKS, TASK_COLUMNS) if (task := _task(row, models)) is not None]
    if not tasks:
        raise NoTraceError(f"{TASKS} has no task that asks for GPUs")
    return Trace(nodes, tuple(sorted(tasks, key=lambda task: (task.created_at, task.name))))


def _rows(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    if not path.is_file():
        raise NoTraceError(f"the folder has no {path.name}")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in needed if name not in (reader.fieldnames or ())]:
            raise NoTraceError(
                f"{path.name} has no column {' and no column '.join(missing)}; it has {reader.fieldnames}"
            )
        return list(reader)


def _task(row: dict[str, str], models: frozenset[str]) -> Task | None:
    wanted = tuple(sorted(filter(None, row["gpu_spec"].split("|"))))
    model = model_pattern(wanted, models)
    has_times = row["creation_time"] and row["deletion_time"]
    if not int(row["num_gpu"]) or not has_times or (wanted and model is None):
        return None
    gpus, gpu_milli = int(row["num_gpu"]), min(int(row["gpu_milli"]), GPU_MILLI)
    memory_mb = None if gpu_milli == GPU_MILLI else float(max(gpu_milli, 1) * MB_PER_MILLI)
    created_at = float(row["creation_time"])
    began_at = float(row["scheduled_time"] or created_at)
    duration_s = max(float(row["deletion_time"]) - began_at, LEAST_DURATION_S)
    return Task(row["name"], gpus, gpu_milli, Wishes(gpus, memory_mb, model), created_at, duration_s)


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
    return replace(trace, nodes=tuple(node for number, node in enumerate(trace.nodes) if number in chosen))


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
