"""The lists of tasks of the replay: a published one is read, and one that is not there is derived as its name says."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.replay.list_tables import DERIVED, PUBLISHED, tell_allocated, tell_lists
from benchmarks.replay.lists import DEFAULT, LISTS, published_file, read_list
from benchmarks.replay.openb import GPU_MILLI, Trace, few_nodes
from benchmarks.shared.results import Results

COLUMNS = ("name", "num_gpu", "gpu_milli", "gpu_spec", "creation_time", "deletion_time", "scheduled_time")
NODES = [("t4", 2, "T4"), ("p100", 2, "P100"), ("g2", 8, "G2"), ("v16", 8, "V100M16"), ("v32", 8, "V100M32")]
NAMES = [one.name for one in LISTS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The default list: of 400 tasks, 6 ask for several GPUs and 150 for a share of one; none names a model."""
    rows = []
    for number in range(400):
        gpus, milli = (8, 1000) if number % 100 == 0 else (2, 1000) if number in {1, 2} else (1, 1000)
        if 200 <= number < 350 and gpus == 1:
            milli = 500
        rows.append((f"pod-{number:03}", gpus, milli, "", 10 * number, 10 * number + 60 * gpus, 10 * number))
    write(tmp_path / "nodes.csv", ("sn", "gpu", "model"), NODES)
    write(tmp_path / "openb_pod_list_default.csv", COLUMNS, rows)
    return tmp_path


def write(path: Path, columns: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows((columns, *rows))


def read(folder: Path, name: str) -> Trace:
    return read_list(folder / "nodes.csv", folder / "openb_pod_list_default.csv", name)


def milli_of(trace: Trace, *, shares: bool = False, several: bool = False) -> int:
    return sum(
        task.milli
        for task in trace.tasks
        if (not shares or task.gpu_milli < GPU_MILLI) and (not several or task.gpus > 1)
    )


def test_multigpu50_is_the_default_list_and_as_much_again_for_several_gpus(folder: Path) -> None:
    default, trace = read(folder, DEFAULT), read(folder, "multigpu50")

    assert milli_of(trace, several=True) / milli_of(trace) == pytest.approx(0.5, abs=0.01)
    assert set(default.tasks) < set(trace.tasks)
    added = set(trace.tasks) - set(default.tasks)
    assert {task.gpus for task in added} == {2, 8}
    assert all(task.duration_s == 60 * task.gpus for task in added)
    assert len({task.created_at for task in added}) > len({task.created_at for task in default.tasks if task.gpus > 1})


def test_gpushare40_has_as_many_tasks_of_which_shares_ask_for_so_much(folder: Path) -> None:
    default, trace = read(folder, DEFAULT), read(folder, "gpushare40")

    assert len(trace.tasks) == len(default.tasks)
    assert milli_of(trace, shares=True) / milli_of(trace) == pytest.approx(0.4, abs=0.02)
    times = {(task.gpus, task.gpu_milli, task.created_at, task.duration_s) for task in default.tasks}
    assert {(task.gpus, task.gpu_milli, task.created_at, task.duration_s) for task in trace.tasks} < times


def test_gpuspec33_names_models_that_have_enough_gpus(folder: Path) -> None:
    default, trace = read(folder, DEFAULT), read(folder, "gpuspec33")

    named = [task for task in trace.tasks if task.wishes.model]
    assert len(named) / len(trace.tasks) == pytest.approx(0.33, abs=0.05)
    assert {task.wishes.model for task in named} == {"T4", "P100", "G2", "V100M*"}
    assert Counter(task.models for task in named)[("V100M16", "V100M32")]
    assert not {task.wishes.model for task in named if task.gpus == 8} & {"T4", "P100"}
    assert [task.name for task in trace.tasks] == [task.name for task in default.tasks]


@pytest.mark.parametrize("name", NAMES)
def test_a_derived_list_is_the_same_every_time_in_the_order_of_arrival_and_names_are_unique(
    folder: Path, name: str
) -> None:
    trace = read(folder, name)

    assert trace == read(folder, name)
    assert [task.created_at for task in trace.tasks] == sorted(task.created_at for task in trace.tasks)
    assert len({task.name for task in trace.tasks}) == len(trace.tasks)


def test_a_published_list_beside_the_default_one_is_read_and_said_to_be_published(folder: Path) -> None:
    """The published lists with more tasks for several GPUs have neither times nor models."""
    default = folder / "openb_pod_list_default.csv"
    write(published_file(default, "multigpu50"), COLUMNS[:3], [("one", 8, 1000), ("two", 1, 1000)])
    traces = {name: read(folder, name) for name in (DEFAULT, *NAMES)}
    results = Results("replay", "Lists by hand.")

    tell_lists(results, traces, [DEFAULT, "multigpu50"])

    assert [task.gpus for task in traces["multigpu50"].tasks] == [8, 1]
    found = {row[0]: row[2] for row in results.tables[0].rows}
    assert found == {DEFAULT: PUBLISHED, "multigpu50": PUBLISHED, "gpushare40": DERIVED, "gpuspec33": DERIVED}
    assert [one.what for one in results.skipped] == ["the list multigpu50 in its own time"]


def test_few_nodes_have_as_many_gpus_as_are_wished_for_and_are_always_the_same(folder: Path) -> None:
    trace = read(folder, DEFAULT)

    for gpus in (1, 10, 28):
        few = few_nodes(trace, gpus, seed=1)
        assert gpus <= few.gpus < gpus + 8
        assert few == few_nodes(trace, gpus, seed=1)
    assert few_nodes(trace, 28, seed=1).nodes == tuple(sorted(trace.nodes, key=lambda node: node.name))


def test_the_figure_is_that_of_the_list_where_ours_is_furthest_behind() -> None:
    allocated = {DEFAULT: (0.96, 0.95), "multigpu50": (0.97, 0.9708), "gpuspec33": (0.96, 0.9601)}
    runs = [
        {"list": name, "policy": policy, "seed": seed, "allocated": part}
        for name, parts in allocated.items()
        for policy, part in zip(("ours", "FGD"), parts, strict=True)
        for seed in (1, 2)
    ]
    results = Results("replay", "Figures by hand.")

    tell_allocated(results, runs, 1.3)

    (figure,) = results.figures
    assert (figure.value, figure.is_met) == (-0.08, False)
    assert figure.why == "with the list multigpu50 the best other one was FGD"
    assert [row[-2] for row in results.tables[0].rows] == ["+1.00", "-0.08", "-0.01"]
