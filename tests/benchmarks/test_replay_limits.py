"""The replay with time limits, on traces small enough to follow by hand, and every kind of list of tasks."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay.limits import DECLARED, VARIANTS, declare, rounded_up
from benchmarks.replay.openb import NoTraceError, Trace, read_trace
from benchmarks.replay.policies import BY_NAME
from benchmarks.replay.runs import TimedRun, run_timed
from benchmarks.replay.synthetic import GPUS_PER_NODE, LOAD, NODES, WIDE, Load, synthetic
from benchmarks.shared.servers import ROOT
from tests.preloaded import run_preloaded

HOUR_S = 3600.0
COLUMNS = ("name", "num_gpu", "gpu_milli", "gpu_spec", "creation_time", "deletion_time", "scheduled_time")


def write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows((columns, *rows))
    return path


def trace_of(folder: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Trace:
    nodes = write(folder / "nodes.csv", ("sn", "gpu", "model"), [("a", 2, "M")])
    return read_trace(nodes, write(folder / "pods.csv", columns, rows))


@pytest.fixture
def line(tmp_path: Path) -> Trace:
    """Two GPUs. The first task has one of them for 2 h. The second wants both from the start on. From 11 minutes on others
    want one: for 30 minutes, and for 3 h.
    """
    asked = ((1, 0, 7200), (2, 1, 60), (1, 660, 1800), (1, 661, 10800))
    return trace_of(
        tmp_path, COLUMNS, [(f"pod-{n}", gpus, 1000, "", at, at + s, at) for n, (gpus, at, s) in enumerate(asked)]
    )


def waits_of(trace: Trace, policy: str, declared: str) -> tuple[float, ...]:
    run = TimedRun(declare(trace, DECLARED[declared], seed=1), BY_NAME[policy], 1)
    run.run()
    return tuple(run.waits_s()[number] for number in range(len(trace.tasks)))


def test_a_task_that_ends_in_time_uses_the_reserved_gpu_and_the_other_waits(line: Trace) -> None:
    """The second begins at 7200 and runs for a minute."""
    assert waits_of(line, "ours", "all declare, exact") == (0, 7199, 0, 7260 - 661)


def test_without_reservations_both_pass(line: Trace) -> None:
    """The third has the other GPU until 2460, then the fourth until 13260."""
    assert waits_of(line, "no reservations", "all declare, exact") == (0, 13259, 0, 2460 - 661)


def test_where_nobody_declares_the_first_lease_that_ends_tells_a_date(line: Trace) -> None:
    """The wide request has waited long by then, and no later one passes it any more."""
    wide = 1
    ours, without = (waits_of(line, rule, "nobody declares") for rule in ("ours", "no reservations"))

    assert ours[wide] < without[wide]


def test_a_declared_date_is_told_as_it_comes_true_and_a_backfill_is_counted(line: Trace) -> None:
    declaring = declare(line, DECLARED["all declare, exact"], seed=1)

    run = run_timed(declaring, BY_NAME["ours"], 1, asks_when=True)

    assert run["backfilled"] == 1
    assert run["told"] == {"waited": 2, "told_later_s": {"declared": [0.0, 0.0]}}


@pytest.mark.parametrize(("lasts_s", "limit_s"), [(1, 900), (900, 900), (901, 1800), (HOUR_S, HOUR_S), (5e5, 604800)])
def test_a_limit_is_rounded_up_to_a_usual_one(lasts_s: float, limit_s: float) -> None:
    assert rounded_up(lasts_s) == limit_s


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: str(variant.name))
def test_so_many_declare_and_no_limit_is_too_short(variant: Any) -> None:
    trace = declare(synthetic(Load(), seed=1), variant, seed=1)

    declared = [task for task in trace.tasks if task.time_limit_s is not None]

    assert len(declared) / len(trace.tasks) == pytest.approx(variant.share, abs=0.1)
    assert all((task.time_limit_s or 0.0) >= task.duration_s for task in declared)
    assert all(task.time_limit_s == task.duration_s for task in declared) or variant.is_rounded


def test_the_synthetic_load_asks_for_so_much_and_has_a_wide_request_every_half_hour() -> None:
    load = Load(lasts_s=6 * HOUR_S)
    trace = synthetic(load, seed=1)

    asked_s = sum(task.gpus * task.duration_s for task in trace.tasks)

    assert asked_s / (NODES * GPUS_PER_NODE * load.lasts_s) == pytest.approx(LOAD, rel=0.1)
    assert [task.created_at for task in trace.tasks if task.gpus == WIDE] == [1800.0 * n for n in range(12)]
    assert synthetic(load, seed=1) == trace != synthetic(load, seed=2)


# --- lists of tasks --------------------------------------------------------------------------------------------------


def test_a_list_without_models_asks_for_any(tmp_path: Path) -> None:
    columns = [name for name in COLUMNS if name != "gpu_spec"]

    trace = trace_of(tmp_path, columns, [("pod", 1, 500, 3, 9, 4)])

    assert (trace.lacks, trace.has_times) == (frozenset({"gpu_spec"}), True)
    (task,) = trace.tasks
    assert (task.wishes.model, task.created_at, task.duration_s) == (None, 3, 5)


def test_a_task_without_times_of_its_own_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [("one", 1, 1000, "", 3, 9, 4), ("two", 1, 1000, "", 3, "", "")]

    trace = trace_of(tmp_path, COLUMNS, rows)

    assert ([task.name for task in trace.tasks], trace.without_times) == (["one"], 1)


def test_a_list_without_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoTraceError, match=r"pods\.csv has no column gpu_milli; it has \['name', 'num_gpu'\]"):
        trace_of(tmp_path, ("name", "num_gpu"), [("one", 1)])
    with pytest.raises(NoTraceError, match=r"pods\.csv has no task that asks for GPUs"):
        trace_of(tmp_path, COLUMNS, [("one", 0, 0, "", 3, 9, 4)])


def test_a_list_without_times_is_drawn_from_and_not_replayed_in_its_own_time(tmp_path: Path) -> None:
    nodes = write(tmp_path / "nodes.csv", ("sn", "gpu", "model"), [(f"node-{n}", 4, "M") for n in range(3)])
    pods = write(tmp_path / "pods.csv", COLUMNS[:3], [(f"pod-{n}", 1 + n % 2, 1000) for n in range(9)])
    results = tmp_path / "results.json"
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "benchmarks.replay",
        "--quick",
        "--nodes",
        nodes,
        "--pods",
        pods,
        "--json",
        results,
    ]

    done = run_preloaded(command, cwd=ROOT)

    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text(encoding="utf-8"))
    reason = "this list of tasks has no creation_time and deletion_time"
    assert found["skipped"] == [{"what": "the trace in its own time", "reason": reason}]
    assert any("no column gpu_spec" in note for note in found["notes"])
    assert {figure["id"] for figure in found["figures"]} == {"replay_allocated", "replay_synthetic_wide"}


def test_a_file_that_is_no_list_of_tasks_is_an_error(tmp_path: Path) -> None:
    nodes = write(tmp_path / "nodes.csv", ("sn", "gpu", "model"), [("a", 2, "M")])
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "benchmarks.replay",
        "--quick",
        "--nodes",
        nodes,
        "--pods",
        nodes,
    ]

    done = run_preloaded(command, cwd=ROOT)

    assert done.returncode == 2
    assert "nodes.csv has no column num_gpu and no column gpu_milli" in done.stderr
