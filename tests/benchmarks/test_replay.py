"""On traces small enough to follow by hand, the replay allocates and lets wait as worked out."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay.__main__ import TimedRun, allocated_percent
from benchmarks.replay.openb import (
    NODES,
    TASKS,
    NoTraceError,
    Trace,
    read_trace,
    sample_nodes,
    sample_tasks,
)

Row = dict[str, Any]


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    rows = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def pod(number: int, gpus: int, gpu_milli: int, spec: str, created: int, ran_s: int, *, ran: bool = True) -> Row:
    return {
        "name": f"pod-{number:04}",
        "num_gpu": gpus,
        "gpu_milli": gpu_milli,
        "gpu_spec": spec,
        "creation_time": created,
        "deletion_time": created + ran_s,
        "scheduled_time": created if ran else "",
    }


def trace_of(place: Path, nodes: Mapping[str, tuple[int, str]], pods: Iterable[Row]) -> Trace:
    write(place / NODES, [{"sn": name, "gpu": gpus, "model": model} for name, (gpus, model) in nodes.items()])
    write(place / TASKS, pods)
    return read_trace(place)


def test_the_gpus_are_filled_as_worked_out_by_hand(tmp_path: Path) -> None:
    """On a, one GPU of model A, and b, two of model B, five tasks ask for just as much as there is.

    The 300 goes beside the 600, and the 100 where there are 100 left. So both other GPUs stay whole, and all five fit.
    """
    asked = ((600, "B"), (300, "B"), (100, ""), (1000, ""), (1000, ""))
    pods = [pod(number, 1, milli, spec, number, 10) for number, (milli, spec) in enumerate(asked)]
    trace = trace_of(tmp_path, {"a": (1, "A"), "b": (2, "B")}, pods)

    assert allocated_percent(trace, trace.tasks) == pytest.approx(100.0)
    # One more finds no GPU and goes; without the last two, a third is allocated.
    assert allocated_percent(trace, (*trace.tasks, trace.tasks[0])) == pytest.approx(100.0)
    assert allocated_percent(trace, trace.tasks[:3]) == pytest.approx(100 / 3)


def test_tasks_wait_for_as_long_as_worked_out_by_hand(tmp_path: Path) -> None:
    """On a, two GPUs, and b, one: the first task is on b until 40, the second on a until 100.

    The third wants two GPUs, which only a has. The fourth has the other GPU of a from 20 to 50, the fifth from 60 to 160: only
    then does the third find two. It has not waited long enough for a reservation before.
    """
    pods = [
        pod(0, 1, 1000, "", 0, 40),
        pod(1, 1, 1000, "", 1, 99),
        pod(2, 2, 1000, "", 10, 50),
        # It stood there for 7 s before it ran for 30.
        pod(3, 1, 1000, "", 20, 37) | {"scheduled_time": 27},
        pod(4, 1, 1000, "", 60, 100, ran=False),
        pod(5, 1, 1000, "", 61, 1),
    ]
    run = TimedRun(trace_of(tmp_path, {"a": (2, "M"), "b": (1, "M")}, pods))

    run.run()

    assert run.waits_s == {0: 0, 1: 0, 2: 150, 3: 0, 4: 0, 5: 0}
    assert run.mean_wait_s() == 25.0
    # Nothing is said of requests that the trace does not have.
    assert run.mean_wait_s(only_wide=True) is None


def test_the_wait_of_wide_requests_is_theirs_alone(tmp_path: Path) -> None:
    pods = [pod(0, 1, 1000, "", 0, 30), pod(1, 5, 1000, "", 10, 10), pod(2, 1, 500, "", 11, 10)]
    run = TimedRun(trace_of(tmp_path, {"a": (5, "M")}, pods))

    run.run()

    assert run.mean_wait_s(only_wide=True) == 20.0
    assert run.mean_wait_s() == pytest.approx(20 / 3)


def test_a_task_that_cannot_be_asked_for_is_left_out(tmp_path: Path) -> None:
    pods = [
        pod(0, 0, 0, "", 0, 10),
        pod(1, 1, 1000, "G2|T4", 0, 10),
        pod(2, 1, 1000, "", 0, 10) | {"deletion_time": ""},
        pod(3, 1, 470, "V100M16|V100M32", 0, 10),
    ]
    trace = trace_of(tmp_path, {"a": (1, "T4"), "b": (1, "G2"), "c": (1, "V100M16"), "d": (0, "none")}, pods)

    assert [node.name for node in trace.nodes] == ["a", "b", "c"]
    (task,) = trace.tasks
    assert (task.name, task.wishes.model, task.wishes.memory_mb) == ("pod-0003", "V100M*", 470 * 16.0)


def test_samples_are_as_large_as_asked_for_and_the_same_for_a_seed(tmp_path: Path) -> None:
    pods = [pod(number, 1, 1000, "", number, 10) for number in range(10)]
    trace = trace_of(tmp_path, {f"n{number}": (2, "M") for number in range(50)}, pods)

    tasks = sample_tasks(trace, 1.3, 1)

    assert sum(task.milli for task in tasks) == 130_000
    assert tasks == sample_tasks(trace, 1.3, 1) != sample_tasks(trace, 1.3, 2)
    assert len(sample_nodes(trace, 0.1, 1).nodes) == 5


def test_a_folder_without_the_trace_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(NoTraceError, match=f"the folder has no {NODES}"):
        read_trace(tmp_path)
    without = pod(0, 1, 1000, "", 0, 1)
    del without["num_gpu"]
    with pytest.raises(NoTraceError, match=r"has no column num_gpu; it has \['name'"):
        trace_of(tmp_path, {"a": (1, "M")}, [without])
