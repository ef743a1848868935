"""The summary of a soak counts what was judged in a history made by hand, and shows a violation as one."""

from __future__ import annotations

import json
from collections import Counter
from math import inf
from pathlib import Path

import pytest

from tests.e2e.fleet.journal_check import Tally, check_fleet
from tests.e2e.fleet.nemesis import FleetNemesis, FleetPlan
from tests.e2e.fleet.scene import Scene
from tests.e2e.fleet.soak_summary import FAULTS, PROMISES, SoakSummary, judged
from tests.e2e.fleet.test_journal_check import Journal
from tests.e2e.history_check import Violation, check
from tests.e2e.run_history import RunHistory
from tests.e2e.scribe import Scribe
from tests.ledger.postgres.server import PostgresServer


def two_holders(second_took_at: float) -> Scribe:
    """One after another on one GPU, if the second one took it after 1.0."""
    scribe = Scribe()
    scribe.asks("a", 0.0)
    scribe.took("a", 0.2, 1)
    scribe.say("witness", 0.2, "a", uuid="gpu0")
    scribe.asks("b", 0.3)
    scribe.answer("b", 0.4, "queued", status=202)
    scribe.renewed("a", 0.5)
    scribe.wrote("a", 0.6, 1, until=2.1)
    scribe.gave_back("a", 1.0)
    scribe.took("b", second_took_at, 2)
    scribe.say("witness", second_took_at, "b", uuid="gpu0")
    scribe.wrote("b", 1.9, 2, until=3.2)
    scribe.killed("b", 2.0)
    scribe.lines.append({"what": "final", "at": 9.0, "who": "nemesis", "leases": [], "gpus": ["free"]})
    return scribe


def history_of(scribe: Scribe) -> RunHistory:
    return RunHistory(scribe.lines, scribe.resources)


def shown(counts: dict[str, int]) -> dict[str, int]:
    """By kind, without the zeros."""
    kinds = {text: kind for kind, text in reversed(PROMISES.items())}
    return {kinds.get(text, text): number for text, number in counts.items() if number}


def test_what_the_lines_of_workers_show_is_counted() -> None:
    assert judged(history_of(two_holders(1.3))) == {
        "held_twice": 1,
        "lock": 2,
        "stale_write": 1,
        "lost": 2,
        "short": 1,
        "answer": 4,
        "dead_holder": 1,
        "left_over": 1,
    }


def test_the_checks_of_the_journal_count_what_they_compare() -> None:
    journal = Journal()
    journal.taken_over(1, 0.0, "a", "b")
    journal.queued("first", 0.1, 1)
    journal.queued("second", 0.2, 2)
    journal.workers.asks("first", 0.0)
    journal.granted("first", 0.3, 1)
    journal.workers.took("first", 0.4, 1)
    journal.taken_over(2, 1.0, "a", "b")
    journal.granted("second", 1.3, 2)
    journal.twins["twin0"] = []
    tally: Tally = Counter()

    assert check_fleet(journal.history(), tally) == []
    assert tally == {
        "gap": 5,
        "epoch": 6,
        "unannounced": 2,
        "obeyed": 2,
        "twin": 1,
        "acknowledged": 1,
        "fence": 1,
        "order": 1,
    }


def test_a_violation_is_shown_as_one(tmp_path: Path) -> None:
    history = history_of(two_holders(0.9))
    found = check(history, is_fleet=True)
    summary = SoakSummary("abc", seeds=[7], faults=Counter(kill_leader=1, unheard_of=2))
    summary.add_workers(history)
    summary.add_violations([*found, *found, Violation("unheard_of", "new")])

    summary.write(tmp_path / "soak.json", 3.04)
    written = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))

    assert shown(written["violations"])["held_twice"] == 1
    assert shown(written["violations"])["unheard_of"] == 1
    assert shown(written["checked"])["held_twice"] == 1
    assert {name: number for name, number in written["faults"].items() if number} == {
        "leader killed": 1,
        "unheard_of": 2,
    }
    assert written["faults"]["box rebooted"] == 0
    assert (written["minutes"], written["seeds"], written["commit"], written["grants"]) == (3.0, [7], "abc", 2)
    assert written["take_overs_s"] == written["hand_overs_s"] == {"count": 0, "never": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["soak.json"]


def test_a_take_over_that_is_late_or_never_comes_is_a_violation() -> None:
    summary = SoakSummary("abc")

    assert len(summary.add_take_overs([2.0, 3.0, 5.5, inf])) == 2
    assert summary.add_take_overs([0.2], is_told=True) == []

    written = summary.written(1.0)
    assert shown(written["checked"]) == {"take_over": 5}
    assert shown(written["violations"]) == {"take_over": 2}
    assert written["take_overs_s"] == {"count": 3, "never": 1, "min": 2.0, "median": 3.0, "max": 5.5}
    assert written["hand_overs_s"] == {"count": 1, "never": 0, "min": 0.2, "median": 0.2, "max": 0.2}


def test_what_the_own_client_met_is_counted_and_what_it_was_told_is_not_judged() -> None:
    scribe = Scribe()
    scribe.asks("new1", 0.0)
    scribe.say("failed", 0.1, "new1", call="request_gpu", error="refused")
    scribe.asks("new2", 0.0)
    scribe.say("took", 0.2, "new2", uuids=["gpu0"], gpu_ids=[0], fence=1)
    scribe.say("left", 0.5, "new2", left_at=0.5, why="lost")
    summary = SoakSummary("abc")

    summary.add_workers(history_of(scribe))

    written = summary.written(1.0)
    assert written["of_client"] == {"requests": 2, "requests that failed": 1, "leases that were lost": 1}
    assert "lost" not in shown(written["checked"])


def test_each_fault_of_the_nemesis_has_a_name(tmp_path: Path, postgres: PostgresServer) -> None:
    scene = Scene(postgres, "no", tmp_path, candidates=0, agents=0, standby=postgres)

    assert {*FleetNemesis(FleetPlan(1), scene).kinds} - {"promote_standby"} <= FAULTS.keys()


@pytest.mark.parametrize("kind", ["held_twice", "acknowledged", "order", "outage", "take_over"])
def test_a_promise_says_what_one_count_of_it_is(kind: str) -> None:
    assert PROMISES[kind].endswith(")")
