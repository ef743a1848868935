"""The lists of tasks that are replayed: the default one of the trace, and others that ask for something else.

The publishers of the trace made them from the default list, to emphasise one kind of task. Where a published file lies beside
the default one, it is read. Where there is none, the list is derived here by a rule with a fixed seed. The rules follow from
the published files:

- multigpu50 is the default list, and after it more tasks for several GPUs, until such tasks ask for half of all GPUs that are
  asked for. The published file has no times, so it is not replayed in its own time. Here, each such task is drawn from those
  of the default list, comes when another task drawn from that list came, and runs for as long as it did.
- gpushare40 has as many tasks as the default list, and those for a share of a GPU ask for 40 % of all that is asked for. Here,
  they are drawn from those of the default list, with their times, as in the published file.
- gpuspec33 is the default list, in which 33 % of the tasks name models. The default list names none. Here, a task names the
  model of a node that is drawn from those with enough GPUs. Both models of the V100 are named together, as in the published
  file. A published task may also name models in a way that the pool cannot ask for; no task does so here.

All shares are those of what is asked for: so many GPUs, or so much of one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.replay.openb import GPU_MILLI, Task, Trace, in_order, model_pattern, owner_of, read_trace

DEFAULT = "default"
SEED = 1
SEVERAL_SHARE, SHARES_SHARE, MODELS_SHARE = 0.5, 0.4, 0.33
NAMED_TOGETHER = ("V100M16", "V100M32")


@dataclass(frozen=True)
class TaskList:
    """A list that differs from the default one, by its published name."""

    name: str
    says: str
    derive: Callable[[Trace, random.Random], Trace]


def more_for_several_gpus(trace: Trace, rng: random.Random) -> Trace:
    """Add tasks for several GPUs until they ask for a share of all that is asked for."""
    several = [task for task in trace.tasks if task.gpus > 1]
    added: list[Task] = []
    several_milli, other_milli = _milli(several), _milli(trace.tasks) - _milli(several)
    while several and several_milli < SEVERAL_SHARE * (several_milli + other_milli):
        drawn = rng.choice(several)
        added.append(replace(_again(drawn, len(added)), created_at=rng.choice(trace.tasks).created_at))
        several_milli += drawn.milli
    return replace(trace, tasks=in_order((*trace.tasks, *added)))


def more_shares(trace: Trace, rng: random.Random) -> Trace:
    """Draw as many tasks as there are, so that those for a share of a GPU ask for a share of all that is asked for."""
    kinds = {
        is_share: [task for task in trace.tasks if (task.gpu_milli < GPU_MILLI) is is_share]
        for is_share in (True, False)
    }
    if not all(kinds.values()):
        return trace
    drawn: list[Task] = []
    asked_milli = {True: 0, False: 0}
    for number in range(len(trace.tasks)):
        is_share = asked_milli[True] < SHARES_SHARE * sum(asked_milli.values())
        drawn.append(_again(rng.choice(kinds[is_share]), number))
        asked_milli[is_share] += drawn[-1].milli
    return replace(trace, tasks=in_order(drawn))


def with_models(trace: Trace, rng: random.Random) -> Trace:
    """Let some of the tasks name the model of a node that has enough GPUs."""
    models = frozenset(node.model for node in trace.nodes)
    able = {gpus: [node.model for node in trace.nodes if node.gpus >= gpus] for gpus in {t.gpus for t in trace.tasks}}

    def named(task: Task) -> Task:
        if rng.random() >= MODELS_SHARE or not able[task.gpus]:
            return task
        model = rng.choice(able[task.gpus])
        wanted = NAMED_TOGETHER if model in NAMED_TOGETHER else (model,)
        return replace(task, models=wanted, wishes=replace(task.wishes, model=model_pattern(wanted, models)))

    return replace(trace, tasks=tuple(named(task) for task in trace.tasks))


LISTS = (
    TaskList("multigpu50", "50 % of what is asked for is asked for by tasks for several GPUs", more_for_several_gpus),
    TaskList("gpushare40", "40 % of what is asked for is asked for by tasks for a share of a GPU", more_shares),
    TaskList("gpuspec33", "33 % of the tasks name a model of GPU", with_models),
)
BY_LIST_NAME = {one.name: one for one in LISTS}


def read_list(nodes_csv: Path, pods_csv: Path, name: str) -> Trace:
    """Read a list of tasks by its published name, or derive it from the default one, which is in `pods_csv`."""
    if name == DEFAULT:
        return read_trace(nodes_csv, pods_csv)
    if (published := published_file(pods_csv, name)).is_file():
        return read_trace(nodes_csv, published)
    return BY_LIST_NAME[name].derive(read_trace(nodes_csv, pods_csv), random.Random(SEED))


def published_file(pods_csv: Path, name: str) -> Path:
    """Return the path of a published list beside the default one."""
    return pods_csv.with_name(f"openb_pod_list_{name}.csv")


def _again(task: Task, number: int) -> Task:
    name = f"{task.name}-{number}"
    return replace(task, name=name, owner=owner_of(name))


def _milli(tasks: Iterable[Task]) -> int:
    return sum(task.milli for task in tasks)
