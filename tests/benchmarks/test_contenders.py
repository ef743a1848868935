"""The comparison with what people would use instead still runs, and its judge is no friend of anybody."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.contenders import figures, order, promises, takers
from benchmarks.contenders.field import COMMAND, FIELD, Contender
from benchmarks.contenders.measures import Patience, taking_turns
from benchmarks.contenders.order import judge, out_of_order
from benchmarks.contenders.worker import Worker, is_locked
from benchmarks.shared.results import Results
from benchmarks.shared.servers import ROOT
from tests.preloaded import run_preloaded


def row(asked: float, granted: float, gpu: int = 0, **more: object) -> dict[str, object]:
    return {"asked": asked, "granted": granted, "gpu": gpu, "twice": False, **more}


def test_a_quick_run_measures_us_and_says_who_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "contenders.json"
    command = [sys.executable, "-m", "benchmarks.contenders", "--quick", "--json", str(file)]

    done = run_preloaded(
        [*command, "--only", "ours, full", "--only", "filelock"],
        timeout_s=100,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr

    found = json.loads(file.read_text(encoding="utf-8"))
    crowd = next(table for table in found["tables"] if "GPUs held twice" in table["columns"])
    ours = dict(zip(crowd["columns"], next(row for row in crowd["rows"] if row[0] == "ours, full"), strict=True))
    assert ours["grants"] >= 16
    assert ours["GPUs held twice"] == 0
    assert "of them out of the order of arrival." in crowd["note"]
    assert not [skipped for skipped in found["skipped"] if skipped["what"].startswith("ours")]
    measured = [row[0] for table in found["tables"] for row in table["rows"]]
    assert "filelock" in measured or "filelock" in [skipped["what"] for skipped in found["skipped"]]
    assert measured.count("ours, full") == 7
    restarted = next(table for table in found["tables"] if "its GPU is granted meanwhile" in table["columns"])
    assert [row[:1] + row[2:4] for row in restarted["rows"]] == [["ours, full", "yes", "no"]]
    assert {plot["id"] for plot in found["plots"]} == {"hand-over", "reclaim", "rate"}
    assert {figure["id"]: figure["value"] for figure in found["figures"]} == dict.fromkeys(
        ("hand_over_vs_blpop", "hand_over_vs_ray", "reclaim_vs_postgres", "crowd_vs_redis", "crowd_vs_ray")
    )
    assert all("was not measured in this run" in figure["why"] for figure in found["figures"])


def test_a_figure_compares_us_with_the_contender_that_its_target_names() -> None:
    results = Results("contenders", "About this.")
    rounds = {"ours, full": [[2.0, 3.0, 4.0], [6.0]], "Redis list": [[1.0], [2.0, 2.0]], "PostgreSQL": [[3.0], [6.0]]}

    figures.hand_over_figures(results, rounds)
    figures.reclaim_figures(results, rounds)
    figures.crowd_figures(results, {"ours, full": [[10.0]], "Redis lock": [[40.0]]}, [0.8])

    assert {figure.id: (figure.value, figure.is_met) for figure in results.figures} == {
        "hand_over_vs_blpop": (3.0, True),
        "hand_over_vs_ray": (None, None),
        "reclaim_vs_postgres": (1.0, True),
        "crowd_vs_redis": (0.25, False),
        "crowd_vs_ray": (None, None),
    }


@pytest.mark.parametrize(("ray_s", "is_met"), [(3.1, True), (3.0, False)])
def test_a_tie_with_ray_is_not_ahead_of_it(ray_s: float, *, is_met: bool) -> None:
    results = Results("contenders", "About this.")

    figures.hand_over_figures(results, {"ours, full": [[3.0]], "Ray task, max_calls=0": [[ray_s]]})

    assert {figure.id: figure.is_met for figure in results.figures}["hand_over_vs_ray"] == is_met


def test_a_contender_that_fails_is_left_out_of_the_rounds_that_follow() -> None:
    told: list[tuple[str, str]] = []

    def measure(contender: Contender) -> list[float]:
        if contender.kind == "filelock":
            raise TimeoutError("a client did not answer")
        return [1.0]

    contenders = [each for each in FIELD if each.name in ("ours, full", "filelock")]
    found = taking_turns(contenders, measure, 3, lambda contender, why, _: told.append((contender.name, why)))

    assert found == {"ours, full": [[1.0]] * 3}
    assert told == [("filelock", "a client did not answer")]


def test_a_server_that_was_waited_for_in_vain_is_left_out_with_all_its_contenders() -> None:
    told: dict[str, str] = {}
    patience = Patience(45.0, told.__setitem__)
    task, reused, ours = (
        next(each for each in FIELD if each.name == name)
        for name in ("Ray task", "Ray task, max_calls=0", "ours, full")
    )

    patience.lost(task, 20.0)
    assert patience.left([task, reused, ours]) == [task, reused, ours]

    patience.lost(reused, 40.0)
    assert patience.left([task, reused, ours]) == [ours]
    assert patience.left([task]) == []
    assert told == {
        "Ray task, the rest": "the run has waited for it in vain for 60 s",
        "Ray task, max_calls=0, the rest": "the run has waited for it in vain for 60 s",
    }


def test_who_asked_later_and_ran_earlier_has_overtaken() -> None:
    fair = [row(number, number + 10) for number in range(20)]

    verdict = judge([*fair, row(2.5, 25.0)])

    assert (verdict.overtaken, verdict.most_places) == (1, 12)
    assert judge(fair).overtaken == 0


def test_what_came_at_about_the_same_time_has_no_order() -> None:
    near = order.MARGIN_S / 2

    assert order.judge([row(1.0, 9.0), row(1.0 + near, 5.0)]).overtaken == 0
    assert order.judge([row(1.0, 9.0), row(3.0, 9.0 - near)]).overtaken == 0
    assert order.judge([row(1.0, 9.0), row(3.0, 5.0)]).overtaken == 1


def turns_of_a_queue(pick: Callable[[int], int], clients: int = 64, gpus: int = 8) -> list[dict[str, object]]:
    """Recorded turns of clients that ask, hold for a moment and ask again; `pick` says who of so many waiters is next."""
    hold = random.Random(7)
    # Nobody asks at the same moment as another.
    waiting = [number / 50 for number in range(clients)]
    free_at = [2.0 + gpu / 50 for gpu in range(gpus)]
    turns = []
    for _ in range(2000):
        gpu = min(range(gpus), key=free_at.__getitem__)
        granted = free_at[gpu]
        asked = waiting.pop(pick(len(waiting)))
        turns.append(row(asked, granted, gpu))
        free_at[gpu] = granted + hold.uniform(0.05, 0.15)
        waiting.append(free_at[gpu])
        waiting.sort()
    return turns


def test_an_order_that_swaps_neighbours_at_random_is_found() -> None:
    lot = random.Random(11)

    assert judge(turns_of_a_queue(lambda _: 0)).overtaken == 0
    assert judge(turns_of_a_queue(lambda _: lot.randrange(2))).overtaken_percent > 5


def test_who_asks_while_all_begin_is_not_judged() -> None:
    rows = [row(1.0, 9.0), row(1.5, 5.0), row(3.0, 8.0), row(4.0, 7.0), row(5.0, 8.5)]

    verdict = judge(rows, beginning_s=1.0)

    assert (verdict.judged, verdict.overtaken, judge(rows).overtaken) == (3, 1, 2)


def test_our_journal_is_asked_for_the_order(tmp_path: Path) -> None:
    told = [("LeaseQueued", "a"), ("LeaseQueued", "b"), ("LeaseGranted", "b"), ("LeaseGranted", "a")]
    with closing(sqlite3.connect(tmp_path / "a journal.sqlite3")) as journal, journal:
        journal.execute("CREATE TABLE event (position INTEGER PRIMARY KEY, kind TEXT, body TEXT)")
        rows = [(kind, json.dumps({"lease_id": name})) for kind, name in told]
        journal.executemany("INSERT INTO event (kind, body) VALUES (?, ?)", rows)

    assert out_of_order(tmp_path / "a journal.sqlite3") == (2, 1)


def test_the_gpu_of_a_dead_holder_is_looked_for() -> None:
    death = row(1.0, 2.0, gpu=3, victim=123, killed=4.0)

    assert judge([death, row(1.0, 4.5, gpu=3), row(1.0, 6.0, gpu=3)]).reused_s == 0.5
    lost = judge([death, row(1.0, 3.0, gpu=3), row(1.0, 9.0, gpu=2)])
    assert lost.reused_s is None
    assert lost.watched_s == 5.0


def test_the_witness_can_testify(tmp_path: Path) -> None:
    file = tmp_path / "0.witness"

    with file.open("w") as one, file.open("w") as other:
        assert is_locked(one.fileno())
        assert not is_locked(other.fileno())


@pytest.mark.parametrize("has_one_gpu", [True, False])
def test_a_crowd_that_is_all_sent_to_one_gpu_is_seen_there(tmp_path: Path, *, has_one_gpu: bool) -> None:
    worker: Any = Worker("anything", {})
    numbers = count()

    class Grants:
        """The first GPU to everybody, or one of its own to each."""

        def __init__(self) -> None:
            self.gpu = 0 if has_one_gpu else next(numbers)

        def take(self) -> Any:
            return takers.Handle(self.gpu, time.monotonic(), os.getpid(), None)

        def release(self, _: object) -> None: ...

    worker.make = Grants
    # Threads instead of processes: a file that each has opened for itself is locked between them as well.
    worker.has_threads = True
    rows = worker.crowd(clients=3, seconds=0.1, folder=str(tmp_path), hold_s=(0.01, 0.02), has_victim=False)["rows"]

    verdict = judge(rows)

    assert verdict.grants >= 6
    assert (verdict.twice > 0) == has_one_gpu
    assert verdict.late_p99_s is not None


def test_what_is_marked_as_measured_was_measured() -> None:
    results = Results("contenders", "About this.")
    unfair = judge([row(1.0, 9.0), row(3.0, 5.0, twice=True)])

    promises.promises(
        results,
        ["ours", COMMAND, "Redis list"],
        {"ours, full": "after 7 ms"},
        {"ours, full": unfair},
        {"ours, full": "kept"},
    )

    ours, other = results.tables[0].rows
    assert "kept (m)" in str(ours[1])
    assert "after 7 ms (m)" in str(ours[2])
    assert ours[3:5] == ["1 of 2 (m)", "first come, first served, by priority (d); 50 % overtaken (m)"]
    assert not any("(m)" in str(cell) for cell in other if cell)


def test_what_is_left_out_by_design_has_a_reason() -> None:
    for each in FIELD:
        is_whole = each.has_hand_over and each.has_reclaim and each.rates == (1, 8, 64) and each.crowd_share > 0
        assert is_whole == (not each.left_out), each.name


def test_a_program_that_is_not_there_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(
        peers.MissingError, match="redis-server is not on the PATH: on Debian, apt-get install redis-server"
    ):
        peers.program("redis-server")
