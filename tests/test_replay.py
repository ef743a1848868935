"""benchmarks/replay.py runs on a trace that anybody can write, and what it says adds up."""

from __future__ import annotations

import csv
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MODELS = (("T4", 2), ("G2", 8), ("V100M16", 4), ("V100M32", 4))
WITHOUT_GPU, NOT_ASKABLE, WITH_GPU = 7, 3, 90
Run = dict[str, Any]


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    rows = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def pod(number: int, gpus: int, gpu_milli: int, spec: str, created: int, ran_s: int, *, ran: bool = True) -> Run:
    return {
        "name": f"pod-{number:04}",
        "num_gpu": gpus,
        "gpu_milli": gpu_milli,
        "gpu_spec": spec,
        "creation_time": created,
        "deletion_time": created + ran_s,
        "scheduled_time": created if ran else "",
    }


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Each run, and what is told of them."""
    place = tmp_path_factory.mktemp("replay")
    rng = random.Random(7)
    nodes = [MODELS[number % len(MODELS)] for number in range(12)]
    pods = [pod(number, 0, 0, "", number, 10) for number in range(WITHOUT_GPU)]
    # No pattern lets in a T4 and a G2 and nothing else.
    pods += [pod(100 + number, 1, 1000, "G2|T4", number, 10) for number in range(NOT_ASKABLE)]
    for number in range(WITH_GPU):
        gpus, milli = rng.choice(((1, 1000), (1, 470), (1, 810), (1, 160), (2, 1000), (8, 1000)))
        spec = "" if gpus == 8 else rng.choice(("", "", "", "T4", "V100M16|V100M32"))
        pods.append(pod(200 + number, gpus, milli, spec, 50 * number, rng.randrange(2000), ran=bool(number % 9)))
    command: list[str | Path] = [
        sys.executable,
        "benchmarks/replay.py",
        "--quick",
        "--nodes",
        write(
            place / "nodes.csv", ({"sn": f"node-{n:02}", "gpu": gpu, "model": m} for n, (m, gpu) in enumerate(nodes))
        ),
        "--pods",
        write(place / "pods.csv", pods),
        "--json",
        place / "results.json",
        "--runs",
        place / "runs.json",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    runs, results = (json.loads((place / name).read_text(encoding="utf-8")) for name in ("runs.json", "results.json"))
    return runs, results


def test_every_task_of_the_trace_is_accounted_for(report: tuple[Run, Run]) -> None:
    trace, runs = report[0]["trace"], report[0]["timed"]

    assert (trace["nodes"], trace["gpus"]) == (12, 54)
    assert (trace["tasks_with_gpu"], trace["without_gpu"]) == (WITH_GPU, WITHOUT_GPU)
    assert trace["not_askable"] == NOT_ASKABLE
    assert runs
    for run in runs:
        assert run["served"] + run["refused"] == run["tasks"] == WITH_GPU
        assert run["never_served"] == 0
        assert sum(size["served"] for size in run["by_size"].values()) == run["served"] == run["wait_s"]["served"]


def test_whoever_is_sampled_is_served_goes_or_waits_and_no_more_is_allocated_than_there_is(
    report: tuple[Run, Run],
) -> None:
    runs = report[0]["sampled"]

    assert {run["policy"] for run in runs} == {name for name, _ in report[1]["tables"][0]["rows"]}
    for run in runs:
        assert run["served"] + run["gone"] + run["refused"] + run["waiting"] == run["tasks"]
        assert (run["waiting"] == 0) or run["unserved"] == "queued"
        assert run["demand"] >= 1.3
        assert 0 < run["allocated"] <= 1
        assert 0 <= run["fragmented_of_capacity"] <= 1 - run["allocated"] + 1e-9
        for before, after in pairwise(run["series"]["points"]):
            assert before[0] < after[0]
            assert before[1] <= after[1] <= min(1, after[0])  # nobody leaves


def test_waits_and_allocation_are_in_range_and_in_order(report: tuple[Run, Run]) -> None:
    for run in report[0]["timed"]:
        waits = run["wait_s"]
        assert 0 <= waits["p50"] <= waits["p95"] <= waits["p99"] <= waits["max"]
        assert 0 <= run["mean_allocated"] <= run["peak_allocated"] <= 1
        assert all(0 <= allocated <= 1 for _, allocated, _ in run["allocation"]["points"])
        assert all(x[0] <= y[0] and x[1] <= y[1] for x, y in pairwise(run["wait_cdf"]["points"]))
        assert run["wait_cdf"]["points"][-1] == [waits["max"], 1.0]
        assert (run["most_waiting"] == 0) == (waits["max"] == 0)
    assert any(run["most_waiting"] for run in report[0]["timed"])


def test_in_a_strict_order_nobody_is_overtaken(report: tuple[Run, Run]) -> None:
    strict = [run for run in report[0]["timed"] if run["policy"] == "strict FIFO"]

    assert strict
    assert all(size["most_overtaken"] == 0 for run in strict for size in run["by_size"].values())


def test_what_is_told_is_what_the_runs_found(report: tuple[Run, Run]) -> None:
    runs, results = report
    policies, sampled, queued, *timed = results["tables"]

    medians = {row[0]: row[1] for row in sampled["rows"]}
    for policy, median in medians.items():
        found = [run["allocated"] for run in runs["sampled"] if (run["policy"], run["unserved"]) == (policy, "skipped")]
        assert median == round(100 * statistics.median(found), 2)
    assert "Quoted from" in sampled["note"]
    assert {row[0] for row in (*sampled["rows"], *queued["rows"])} == {name for name, _ in policies["rows"]}
    (figure,) = results["figures"]
    assert figure["value"] == medians["ours"]
    assert len([table for table in timed if table["title"].endswith("GPUs)")]) == 5
    assert all(plot["series"] for plot in results["plots"])
