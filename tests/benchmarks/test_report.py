"""Every benchmark still runs and gives results that fit together, and the document shows them and no other number."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.balancing import chance
from benchmarks.report.document import details, document, image_of
from benchmarks.report.figures import FIGURES, OF_DESIGN, OWN, READING
from benchmarks.report.machine import during_the_run, processor_times
from benchmarks.report.measure import BENCHMARKS, ROOT, NotMeasuredError, read, run, with_added
from benchmarks.report.writing import DATA, DETAILS, DOCUMENT
from benchmarks.shared.processes import Busy, cpu_s, high_water_mb, pss_mb, resident_mb, run_queue_s
from benchmarks.shared.results import Results, duration, ecdf, show, shown, to_json
from benchmarks.shared.targets import bounded, ratio, ratio_when_quiet_too
from gpu_worker_pool.server.authority.own_box import QUICK_SAMPLE_S
from tests.preloaded import run_preloaded
from tests.processes import has_ended

# These have tests of their own.
RUN_HERE = [benchmark.name for benchmark in BENCHMARKS if benchmark.name not in {"contenders", "replay"}]
# Only a whole run starts the servers for the first; the others are of the contenders and of the replay.
NOT_HERE = {
    "full_vs_normal_64_gpus",
    "crowd_vs_redis",
    "crowd_vs_ray",
    "hand_over_vs_blpop",
    "hand_over_vs_ray",
    "reclaim_vs_postgres",
    "replay_allocated",
    "replay_wait",
    "replay_wait_wide",
    "replay_synthetic_wide",
}
LIMIT_S = 120.0
# The document is for people who have a few minutes.
MOST_LINES = 500
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@cache
def quick_results(name: str) -> dict[str, Any]:
    """What a benchmark writes in a quick run."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "results.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(data)]
        done = run_preloaded(command, cwd=ROOT, timeout_s=LIMIT_S)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(data.read_text(encoding="utf-8"))
    for table in found["tables"]:
        assert table["title"] in done.stdout
    return found


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_benchmark_runs_and_its_results_fit_together(name: str) -> None:
    results = quick_results(name)

    assert (results["name"], results["is_quick"]) == (name, True)
    assert results["tables"]
    for table in results["tables"]:
        assert table["rows"]
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    for plot in results["plots"]:
        assert plot["series"]
        for series in plot["series"].values():
            assert len(series["x"]) == len(series["y"]) > 0
    for figure in results["figures"]:
        assert (figure["value"] is None) == (figure["is_met"] is None)
        assert figure["is_met"] or figure["why"]
        if bound := re.search(r"([<>])= ([\d.]+)", figure["target"]):
            limit, value = float(bound[2]), figure["value"]
            assert value is None or figure["is_met"] == (value <= limit if bound[1] == "<" else value >= limit)


def test_every_figure_is_measured_by_some_benchmark_against_the_target_that_is_shown_without_it() -> None:
    targets = {figure["id"]: figure["target"] for name in RUN_HERE for figure in quick_results(name)["figures"]}
    ids = FIGURES.keys() - NOT_HERE

    assert targets.keys() >= ids
    assert [
        (targets[figure_id], FIGURES[figure_id].target)
        for figure_id in ids
        if NUMBER.findall(targets[figure_id])[0] != NUMBER.findall(FIGURES[figure_id].target)[0]
    ] == []


# --- the document ----------------------------------------------------------------------------------------------------


def results_of(name: str, **parts: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {"notes": [], "skipped": [], "tables": [], "plots": [], "figures": []}
    return {"name": name, "about": "About this.", "is_quick": False, **nothing, **parts}


def run_of(*benchmarks: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {"note": "", "machine": {}, "plots_skipped": "", "benchmarks": list(benchmarks), **parts}


def measured(results: dict[str, Any]) -> dict[str, Any]:
    name = results["name"]
    return {"name": name, "command": f"python {name}.py", "took_s": 71.0, "failure": "", "results": results}


FIGURE = {"id": "lease_vs_redis", "what": "a lease", "unit": "x", "target": "<= 2.5", "spread": "rounds: 81 to 83"}
TABLE = {"columns": ["", "a | b"], "note": "N."}
EXAMPLE = run_of(
    measured(
        results_of(
            "leases",
            notes=["Redis: redis-server 97.91."],
            skipped=[{"what": "Ray", "reason": "pip found none for 93"}],
            tables=[
                {**TABLE, "title": "A table", "rows": [["one", 987654.3], ["two", None]], "is_headline": True},
                {**TABLE, "title": "Details", "rows": [["three", 123.4]], "is_headline": False},
                {**TABLE, "title": "An older table", "rows": [["four", 4]]},
            ],
            plots=[{"id": "p", "title": "A plot", "note": "", "is_headline": True}],
            figures=[{**FIGURE, "value": 86.421, "is_met": False, "why": "the reason"}],
        )
    ),
    {"name": "late", "command": "python late.py", "took_s": 9.0, "failure": "it took too long", "results": None},
    machine={"processor": "one of 79 cores"},
)


def test_the_document_shows_what_was_measured_and_what_was_not() -> None:
    text = document(EXAMPLE)

    assert "| a lease | 86.4 x | ≤ 2.5 | **missed** | the reason |" in text
    assert "| import of the client | - | ≤ 60 ms | not measured | no benchmark of this run has measured it |" in text
    assert (
        f"Of {len(OF_DESIGN)} targets of the design, 0 are reached, 1 missed and {len(OF_DESIGN) - 1} not measured."
        in text
    )
    assert f"Of {len(OWN)} bounds that the benchmarks set for themselves, 0 are reached" in text
    assert "| one | 987,654 |\n| two | - |" in text
    assert "a \\| b" in text
    assert "- late: it took too long\n" in text
    assert "![A plot](images/bench-leases-p.svg)" in text


def test_what_people_do_not_ask_for_first_is_in_the_details_and_nothing_is_in_both() -> None:
    first, second = document(EXAMPLE), details(EXAMPLE)

    assert "| a lease | 86.4 x | rounds: 81 to 83 |" in second
    assert "- Ray: pip found none for 93" in second
    assert [title in first for title in ("### A table", "### Details", "### An older table")] == [True, False, False]
    assert [title in second for title in ("### A table", "### Details", "### An older table")] == [False, True, True]
    assert "[the details](BENCHMARK_DETAILS.md#leases)" in first
    assert "[Benchmarks](BENCHMARKS.md#leases)" in second


def test_the_documents_have_no_number_that_is_not_in_the_data() -> None:
    own = set(NUMBER.findall(document(run_of()) + details(run_of())))
    numbers = {show(number) for number in (987654.3, 86.421, 71.0, 123.4, len(OF_DESIGN) - 1)}

    found = set(NUMBER.findall(document(EXAMPLE) + details(EXAMPLE))) - own

    assert found <= numbers | set(NUMBER.findall(to_json(EXAMPLE)))
    assert numbers <= found


def test_a_benchmark_that_is_measured_later_takes_its_place_among_the_others() -> None:
    first = {"date": "2026-11-16", "commit": "a1"}
    known = run_of(measured(results_of("leases")), measured(results_of("turns")), note="the first", machine=first)
    again = {**measured(results_of("turns")), "took_s": 5.0}

    joined = with_added(known, [measured(results_of("agents")), again], {"date": "2026-11-17", "commit": "b2"})

    assert [one["name"] for one in joined["benchmarks"]] == ["leases", "turns", "agents"]
    assert joined["benchmarks"][1]["took_s"] == 5.0
    assert joined["note"] == "the first"
    assert [one["commit"] for one in joined["benchmarks"]] == ["a1", "b2", "b2"]
    assert joined["machine"]["all of it took"] == "2.5 minutes, in several runs"


def test_numbers_of_several_runs_are_not_called_those_of_one() -> None:
    shown = results_of("turns", tables=[{**TABLE, "title": "T", "rows": [["one", 1]], "is_headline": True}])
    known = run_of(measured(results_of("leases")), machine={"date": "2026-11-16", "commit": "a1"})

    one, two = document(known), document(with_added(known, [measured(shown)], {"date": "2026-11-17", "commit": "b2"}))

    assert "Every number was measured in one run on one machine." in one
    assert "The numbers were measured in 2 runs on one machine, and each section says in which." in two
    assert "in 71 s on 2026-11-17 with commit b2." in two


def test_the_document_says_what_a_simulated_gpu_hides() -> None:
    text = document(run_of(machine={READING: "92 µs"}))

    assert "**All GPUs are simulated**: a reading of 8 of them takes 92 µs." in text
    assert f"If a reading takes longer than {1000 * QUICK_SAMPLE_S:g} ms" in text


def test_plots_that_could_not_be_drawn_are_not_linked() -> None:
    text = document({**EXAMPLE, "plots_skipped": "no matplotlib"})

    assert "- plots: no matplotlib" in text
    assert "images/" not in text


@pytest.mark.skipif(not DATA.exists(), reason="nothing was measured for the document yet: make bench")
def test_the_documents_are_what_their_data_make_them() -> None:
    data = json.loads(DATA.read_text(encoding="utf-8"))

    told = "do not edit it: python -m benchmarks.report --again"
    assert DOCUMENT.read_text(encoding="utf-8") == document(data), told
    assert DETAILS.read_text(encoding="utf-8") == details(data), told
    assert len(document(data).splitlines()) <= MOST_LINES, "leave out is_headline for some tables"
    plots = {
        image_of(one["name"], plot["id"])
        for one in data["benchmarks"]
        if one["results"]
        for plot in one["results"]["plots"]
    }
    drawn = {path.name for path in (DOCUMENT.parent / "images").glob("bench-*.svg")}
    assert drawn == (set() if data["plots_skipped"] else plots)


# --- its parts -------------------------------------------------------------------------------------------------------


def test_a_benchmark_that_takes_too_long_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(
        "import subprocess, pathlib\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "try:\n    child.wait()\n"
        f"except KeyboardInterrupt:\n    pathlib.Path({str(tmp_path / 'told')!r}).touch()\n",
        encoding="utf-8",
    )

    with pytest.raises(NotMeasuredError, match="longer than 1 s"):
        run([sys.executable, str(script)], 1.0)

    assert (tmp_path / "told").exists()
    assert has_ended(int((tmp_path / "pid").read_text(encoding="ascii")), within_s=10.0)


def test_a_benchmark_that_fails_says_so_in_its_last_line(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("raise SystemExit('the disk is full')", encoding="utf-8")

    with pytest.raises(NotMeasuredError, match="it failed: the disk is full"):
        run([sys.executable, str(script)], 30.0)


def test_results_of_another_shape_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "results.json"

    with pytest.raises(NotMeasuredError, match="wrote nothing"):
        read(data)
    data.write_text('{"name": "replay", "waits": []}', encoding="utf-8")
    with pytest.raises(NotMeasuredError, match="no about, figures, is_quick"):
        read(data)


def test_numbers_are_shown_to_three_digits() -> None:
    assert [show(cell) for cell in (None, "as it is", 0, 12345, 0.0012345, 1.5, 98765.4)] == [
        "-", "as it is", "0", "12,345", "0.00123", "1.50", "98,765",
    ]  # fmt: skip
    assert [duration(seconds) for seconds in (0.00043, 0.00123, 2.1)] == ["430 µs", "1.23 ms", "2.10 s"]


def test_a_distribution_keeps_its_ends_however_many_values_it_has() -> None:
    assert ecdf([3.0, 1.0, 2.0, 2.0]) == [(1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]
    assert ecdf(float(value) for value in range(1000))[-1] == (999.0, 1.0)
    assert len(ecdf(float(value) for value in range(1000))) == 100


def test_a_bound_is_reached_up_to_it_or_from_it_on() -> None:
    results = Results("any", "About this.")

    bounded(results, "most", "it", 5.0, "ms", most=5.0, why="too slow")
    bounded(results, "least", "it", 49.0, "%", least=50.0, why="too few")
    bounded(results, "none", "it", None, "ms", most=5.0, spread="rounds: 1 to 2", why="it is not installed")
    bounded(results, "close", "it", 5.0004, "ms", most=5.0, why="too slow")

    assert [(each.target, each.is_met, each.why) for each in results.figures] == [
        ("<= 5 ms", True, ""), (">= 50 %", False, "too few"), ("<= 5 ms", None, "it is not installed"),
        ("<= 5 ms", False, "too slow"),
    ]  # fmt: skip
    assert [shown(asdict(each)) for each in results.figures] == ["5 ms", "49 %", "-", "5.0004 ms"]
    assert results.figures[2].spread == ""


def test_a_ratio_is_that_of_the_rounds_and_quiet_rounds_must_reach_it_too() -> None:
    results = Results("any", "About this.")
    ours, theirs = [2.0, 30.0, 8.0], [1.0, 20.0, 8.0]

    ratio(results, "ratio", "it", ours, theirs, most=1.6, why="")
    ratio_when_quiet_too(results, "quiet", "it", ours, theirs, most=1.6, why="slow when quiet", missing="")
    ratio(results, "alone", "it", ours, [], most=1.6, why="", missing="it is not installed")

    assert [(each.value, each.is_met, each.why) for each in results.figures] == [
        (1.5, True, ""), (1.5, False, "slow when quiet"), (None, None, "it is not installed"),
    ]  # fmt: skip


def test_a_process_is_weighed_and_its_time_is_counted() -> None:
    pid = os.getpid()
    busy = Busy(pid)

    # The kernel counts by ticks, so it must be many of them.
    assert busy.during(lambda: float(sum(range(5_000_000))), 2) > 0

    assert 0 < busy.cycle_s() < cpu_s(pid)
    assert 0 < pss_mb(pid) <= resident_mb(pid) <= high_water_mb(pid)
    assert run_queue_s(pid) >= 0


def test_what_the_processors_did_during_a_run_is_told_in_parts_of_all_their_time() -> None:
    began = [10, 0, 10, 100, 5, 0, 0, 1]
    ended = [40, 5, 20, 140, 10, 3, 2, 6]

    assert during_the_run(began, ended).split(", ") == [
        "50 % in use",
        "5.0 % idle while a disk was waited for",
        "5.0 % taken by the host for other machines (steal)",
    ]
    assert all(now >= 0 for now in processor_times())


def test_the_chance_of_a_chi_square_is_that_of_the_tables() -> None:
    """The 5 % and the 95 % point of five degrees of freedom."""
    assert chance(11.070, 5) == pytest.approx(0.05, abs=0.002)
    assert chance(1.145, 5) == pytest.approx(0.95, abs=0.002)
