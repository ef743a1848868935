"""benchmarks/replay runs on a trace that anybody can write, what it says adds up, and on traces small enough to follow
by hand every policy does what its name says.
"""

from __future__ import annotations

import csv
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay.limits import NOBODY
from benchmarks.replay.lists import BY_LIST_NAME
from benchmarks.replay.openb import Trace, read_trace
from benchmarks.replay.policies import BY_NAME, POLICIES
from benchmarks.replay.runs import TimedRun, fill, run_timed
from benchmarks.replay.tables import cost_of_reservations, tell_timed, who_starves
from benchmarks.shared.results import Results
from benchmarks.shared.servers import ROOT
from tests.preloaded import run_preloaded

MODELS = (("T4", 2), ("G2", 8), ("V100M16", 4), ("V100M32", 4))
WITHOUT_GPU, NOT_ASKABLE, WITH_GPU, NEVER_SCHEDULED = 7, 3, 90, 10
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
        "-m",
        "benchmarks.replay",
        "--quick",
        "--nodes",
        write(
            place / "nodes.csv", ({"sn": f"node-{n:02}", "gpu": gpu, "model": m} for n, (m, gpu) in enumerate(nodes))
        ),
        "--pods",
        write(place / "pods.csv", pods),
        "--variants",
        "--json",
        place / "results.json",
        "--runs",
        place / "runs.json",
    ]
    result = run_preloaded(command, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    runs, results = (json.loads((place / name).read_text(encoding="utf-8")) for name in ("runs.json", "results.json"))
    return runs, results


def test_every_task_of_the_trace_is_accounted_for(report: tuple[Run, Run]) -> None:
    trace, runs = report[0]["trace"], report[0]["timed"]

    assert (trace["nodes"], trace["gpus"]) == (12, 54)
    assert (trace["tasks_with_gpu"], trace["without_gpu"]) == (WITH_GPU, WITHOUT_GPU)
    assert (trace["not_askable"], trace["never_scheduled"]) == (NOT_ASKABLE, NEVER_SCHEDULED)
    assert f"{NEVER_SCHEDULED} of these (11.1%) were never scheduled" in report[1]["notes"][1]
    assert runs
    for run in runs:
        assert run["served"] + run["refused"] == run["tasks"]
        assert run["tasks"] == WITH_GPU or run["list"] == "multigpu50"
        assert run["never_served"] == 0
        assert sum(size["served"] for size in run["by_size"].values()) == run["served"] == run["wait_s"]["served"]


def test_whoever_is_sampled_is_served_goes_or_waits_and_no_more_is_allocated_than_there_is(
    report: tuple[Run, Run],
) -> None:
    runs = report[0]["sampled"]

    assert {run["policy"] for run in runs} == {policy.name for policy in POLICIES if policy.is_placement}
    for run in runs:
        assert run["served"] + run["gone"] + run["refused"] == run["tasks"]
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
        assert 0 <= run["mean_allocated_while_they_arrive"] <= run["peak_allocated"] <= 1
        assert waits["starved"] == sum(size.get("starved", 0) for size in run["by_size"].values()) <= waits["waited"]
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
    lists, _, sampled, by_list, *timed = results["tables"]

    medians = {row[0]: row[1] for row in sampled["rows"]}
    allocated: dict[str, list[float]] = {}
    for run in runs["sampled"]:
        if run["list"] == "default":
            allocated.setdefault(run["policy"], []).append(run["allocated"])
    assert medians == {policy: f"{100 * statistics.median(found):.2f}" for policy, found in allocated.items()}
    assert "Quoted, not measured here, from" in sampled["note"]
    assert [row[0] for row in lists["rows"]] == [row[0] for row in by_list["rows"]] == ["default", *BY_LIST_NAME]
    figure, *others = results["figures"]
    assert {one["id"] for one in others} == {"replay_wait", "replay_wait_wide", "replay_synthetic_wide"}
    ours = allocated.pop("ours")
    leads = [100 * (mine - max(others)) for mine, *others in zip(ours, *allocated.values(), strict=True)]
    assert by_list["rows"][0][-2] == f"{statistics.median(leads):+.2f}"
    assert figure["value"] == min(float(row[-2]) for row in by_list["rows"])
    assert figure["is_met"] == (figure["value"] >= -0.05)
    assert all(plot["series"] for plot in results["plots"])
    # Each row is one run.
    tables = [table for table in timed if table["title"].endswith("GPUs)")]
    rows = [(table["title"], row) for table in tables for row in table["rows"]]
    assert len(tables) == 1
    undeclared = [run for run in runs["timed"] if run["declared"] == NOBODY.name and run["list"] == "default"]
    for run, (title, row) in zip(undeclared, rows, strict=True):
        assert title.endswith(f"{run['gpus']} GPUs)")
        waits = run["wait_s"]
        assert row[:3] == [run["policy"], waits["waited"], waits["mean"]]
        assert row[6:8] == [round(waits["max"]), waits["starved"]]
    assert {plot["title"] for plot in results["plots"][1:]} == {
        table["title"] for table in tables if not table["note"].startswith("No task waited.")
    }


# --- traces to follow by hand ----------------------------------------------------------------------------------------

SEEDS = range(200)


def trace_of(place: Path, nodes: Mapping[str, tuple[int, str]], pods: Iterable[Run]) -> Trace:
    rows = [{"sn": name, "gpu": gpus, "model": model} for name, (gpus, model) in nodes.items()]
    return read_trace(write(place / "nodes.csv", rows), write(place / "pods.csv", pods))


@pytest.fixture
def crowd(tmp_path: Path) -> Trace:
    """On a, one GPU of model A, and b, two of model B, five tasks that ask for just as much as there is. Fragmentation is a
    mean over the five: of a whole GPU of a, two fifths of the work have no use, since they want a B.
    """
    asked = ((600, "B"), (300, "B"), (100, ""), (1000, ""), (1000, ""))
    pods = [pod(number, 1, milli, spec, number, 10) for number, (milli, spec) in enumerate(asked)]
    return trace_of(tmp_path, {"a": (1, "A"), "b": (2, "B")}, pods)


# Asked for, allocated and fragmented after each task, in thousandths of a GPU. The 600 leaves 400 and 1000 on b: 400 on a,
# and of b's 400 a fifth of the work (600) and two fifths (1000) have no use. The 300 goes there too and leaves 100, of use to
# the 100 only: 4/5 of 100.
BEGINNING = [(600, 600, 400 + 240), (900, 900, 400 + 80)]
# The 100 goes where there are 100 left, and both whole GPUs stay whole: 400 on a until it is taken, nothing on b.
ALL_FIT = [*BEGINNING, (1000, 1000, 400), (2000, 2000, 0), (3000, 3000, 0)]
FILLED = {
    "ours": ALL_FIT,
    "FGD": ALL_FIT,
    # The 100 goes to a, which has 1000 left where b has 1100: of a's 900, 4/5 are of no use; the last one finds no GPU.
    "best fit": [*BEGINNING, (1000, 1000, 720 + 80), (2000, 2000, 720 + 80), (3000, 2000, 720 + 80)],
}


@pytest.mark.parametrize("policy", FILLED)
def test_a_placement_fills_the_gpus_as_worked_out_by_hand(crowd: Trace, policy: str) -> None:
    run = fill(crowd, crowd.tasks, BY_NAME[policy], seed=1)

    points = [tuple(round(3000 * part, 6) for part in point) for point in run["series"]["points"]]
    assert points == FILLED[policy]
    assert run["allocated"] == pytest.approx(FILLED[policy][-1][1] / 3000)
    assert run["fragmented_of_capacity"] == pytest.approx(FILLED[policy][-1][2] / 3000)
    assert (run["served"], run["gone"]) == ((4, 1) if policy == "best fit" else (5, 0))


def test_the_random_placement_takes_any_node_and_any_of_its_gpus(crowd: Trace) -> None:
    """The 300 goes beside the 600 in half of all cases. If so, the 100 must join them to leave two whole GPUs, a quarter of
    these; if not, the 100 on a leaves none, half of these. All else leaves one.
    """
    runs = (fill(crowd, crowd.tasks, BY_NAME["random"], seed) for seed in SEEDS)

    found = Counter(round(3000 * run["allocated"]) for run in runs)

    expected = {3000: 1 / 8, 1000: 1 / 4, 2000: 5 / 8}
    assert found.keys() == expected.keys()
    for milli, part in expected.items():
        assert found[milli] / len(SEEDS) == pytest.approx(part, abs=0.1)


@pytest.fixture
def line(tmp_path: Path) -> Trace:
    """On a, two GPUs, and b, one: two tasks that take a GPU each, one that wants two and can have them on a only, and three
    behind it that want one. The last two numbers of each: when it comes, and for how long it runs.
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
    return trace_of(tmp_path, {"a": (2, "M"), "b": (1, "M")}, pods)


# The first is on b until 40, the second on a until 100. The fourth has a's other GPU from 20 to 50, the fifth from 60 to 160:
# only then does the third find two. It has not waited long enough for a reservation before.
UNRESERVED = (0, 0, 150, 0, 0, 0)
WAITS_S = {
    "ours": UNRESERVED,
    "best fit": UNRESERVED,
    "no reservations": UNRESERVED,
    # The third can start at 100 on a. The fourth and the last one end before; the fifth does not, and has b.
    "EASY, exact limits": (0, 0, 90, 0, 0, 0),
    # The third waits for the second, and holds the other GPU of a: so the fourth waits for b, the fifth for the fourth there
    # until 70, and the last one for a, which the third has from 100 to 150.
    "the earlier rule": (0, 0, 90, 20, 10, 89),
    # Nobody asks before the third has begun at 100: the fourth begins then on b, until 130.
    "strict FIFO": (0, 0, 90, 80, 70, 89),
}
# GPUs times seconds until the last one comes at 61, of 3 times 61: the first two take 40 and 60, the fourth what it has by
# then, and where nothing is held the fifth 1.
ALLOCATED_S = dict.fromkeys(WAITS_S, 100 + 30 + 1) | {"the earlier rule": 100 + 21, "strict FIFO": 100}


def waits_of(trace: Trace, policy: str, seed: int = 1) -> tuple[float, ...]:
    run = TimedRun(trace, BY_NAME[policy], seed)
    run.run()
    return tuple(run.waits_s()[number] for number in range(len(trace.tasks)))


@pytest.mark.parametrize("policy", WAITS_S)
def test_whoever_waits_does_so_for_as_long_as_worked_out_by_hand(line: Trace, policy: str) -> None:
    run = run_timed(line, BY_NAME[policy], seed=1)
    waits = run["wait_s"]

    assert waits_of(line, policy) == WAITS_S[policy]
    assert waits["mean"] == pytest.approx(sum(WAITS_S[policy]) / 6)
    assert waits["waited"] == sum(wait_s > 0 for wait_s in WAITS_S[policy])
    assert waits["max"] == max(WAITS_S[policy])
    assert waits["starved"] == (WAITS_S[policy][5] > 10)  # the last one runs for a second, the others for long
    assert run["mean_allocated_while_they_arrive"] == pytest.approx(ALLOCATED_S[policy] / (3 * 61))


def test_at_random_whoever_waits_does_so_in_one_of_three_ways(line: Trace) -> None:
    """The first two are on a and b: the third begins at 40 or, if the fourth is on a by then, at 160. Or both are on a."""
    found = {waits_of(line, "random", seed) for seed in SEEDS[:40]}

    assert UNRESERVED in found
    assert {waits[:2] for waits in found} == {(0, 0)}


def test_what_reservations_cost_and_buy_and_who_starves_is_said_as_it_was_found(line: Trace) -> None:
    # Of the rules that keep GPUs for a waiter, only the earlier one does so at once.
    runs = {"ours": run_timed(line, BY_NAME["the earlier rule"], seed=3) | {"policy": "ours"}}
    runs["no reservations"] = run_timed(line, BY_NAME["no reservations"], seed=3)

    said = cost_of_reservations(runs["ours"], runs["no reservations"])
    the_other_way = cost_of_reservations(runs["no reservations"], runs["ours"])

    worse = "the number that waited (4 instead of 1), the mean wait (34.8 instead of 25 s)."
    better = "the longest wait (90 instead of 150 s), the mean wait for several GPUs (90 instead of 150 s), "
    assert (
        f"Worse: {worse} Better: {better}the longest wait for several GPUs (90 instead of 150 s). The same: nothing."
        in said
    )
    assert "Better: the number that waited (1 instead of 4), the mean wait (25 instead of 34.8 s)." in the_other_way
    same = cost_of_reservations(runs["ours"], runs["ours"])
    assert "Worse: nothing. Better: nothing. The same: the number that waited (4), the mean wait (34.8 s)" in same
    assert who_starves(runs).endswith("ours: 1 GPU, 1 of 5; no reservations: none.")
    results = Results("replay", "A trace by hand.")
    tell_timed(results, list(runs.values()))
    assert results.plots[0].title == results.tables[0].title
    assert results.tables[0].title.endswith("on 2 of its nodes (3 GPUs)")
    assert said in results.tables[0].note
