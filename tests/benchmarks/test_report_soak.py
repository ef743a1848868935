"""The summary of a soak is checked before it is stored, and the document shows it and says of which run it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.document import document
from benchmarks.report.soak import CLEARER, TOO_WEAK, NoSummaryError, read
from tests.e2e.fleet.soak_summary import FAULTS, PROMISES, SoakSummary

SUMMARY = {
    "minutes": 61.2,
    "date": "2026-11-17",
    "commit": "abcdef1234",
    "seeds": [7, 8],
    "machine": "2 cores",
    "faults": {"a leader is killed": 12, "a box is cut off": 34},
    "grants": 5678,
    "checked": {"no GPU is granted twice": 9012, "no lease is lost": 345},
    "violations": {"no lease is lost": 0},
    "take_overs_s": {"count": 12, "never": 0, "min": 1.5, "median": 2.5, "max": 4.25},
    "hand_overs_s": {"count": 0, "never": 2},
    "of_client": {"requests": 40, "requests that failed": 3},
    "commits_lost": 17,
    "faults_that_did_not_come": 0,
}


def stored(**changes: Any) -> dict[str, Any]:
    soak = {**SUMMARY, **changes}
    return {"note": "", "machine": {}, "plots_skipped": "", "benchmarks": [], "soak": soak}


def test_a_summary_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**SUMMARY, "other": 1}), encoding="utf-8")

    assert read(path) == SUMMARY


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds no JSON object"),
        (json.dumps({**SUMMARY, "grants": "many"}), "not the summary of a soak: grants missing or of another type"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "summary.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(NoSummaryError, match=told):
        read(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSummaryError, match="cannot be read"):
        read(tmp_path / "none.json")


def test_the_document_shows_the_faults_what_was_checked_and_of_which_run_it_is() -> None:
    text = document(stored())

    assert "## Soak: 61.2 minutes of faults" in text
    assert "2 fleets ran, one after the other, for 61.2 minutes in all" in text
    assert (
        "a run of its own, of 2026-11-17, with commit abcdef1234, seeds 7, 8, on 2 cores. It made 5,678 grants." in text
    )
    assert "No violation of a promise was found." in text
    assert "| a leader is killed | 12 |\n| a box is cut off | 34 |" in text
    assert "| no GPU is granted twice | 9,012 | 0 |\n| no lease is lost | 345 | 0 |" in text
    assert "another one granted 12 times after 2.50 s in the median, 1.50 s at least and 4.25 s at most." in text
    assert (
        "After a leader was told to stop while all else was well, another one granted 0 times. In 2 cases none did."
        in text
    )
    assert "met these, in crowds and while faults were injected: requests 40, requests that failed 3." in text
    assert "lacked 17 commits" in text
    assert "not shown" not in text


def test_a_promise_that_was_not_checked_is_named() -> None:
    assert "found. 1 promise of the table could not be checked." in document(
        stored(checked={"no GPU": 0, "no lease": 1})
    )


def test_what_a_soak_writes_can_be_stored(tmp_path: Path) -> None:
    SoakSummary("abc", seeds=[1]).write(tmp_path / "summary.json", 2.5)

    assert "1 fleet ran, for 2.50 minutes in all" in document(stored(**read(tmp_path / "summary.json")))


OLDER = {
    "checked": {**dict.fromkeys(TOO_WEAK, 5), **{f"{text} (of these)": 6 for text in CLEARER}},
    "violations": dict.fromkeys(TOO_WEAK, 0),
    "take_overs_s": {"count": 12, "min": 1.5, "median": 2.5, "max": 4.25},
}


def test_the_weak_checks_of_an_older_summary_are_named_and_not_shown() -> None:
    text = document(stored(**OLDER))

    assert not [weak for weak in TOO_WEAK if f"| {weak} |" in text]
    assert all(f'"{weak}": {why}' in text for weak, why in TOO_WEAK.items())
    assert "3 checks of this run are not shown, because they were found too weak and were repaired since." in text
    assert all(f"| {clear} | 6 | 0 |" in text for clear in CLEARER.values())
    assert "or was broken, 12 times while all else was well. Where another one granted, it did so after 2.50 s" in text


def test_a_violation_that_a_weak_check_found_is_shown() -> None:
    weak = next(iter(TOO_WEAK))

    text = document(stored(**{**OLDER, "violations": {weak: 1}}))

    assert f"| {weak} | 5 | 1 |" in text
    assert "**1 violation of a promise was found.**" in text
    assert "2 checks of this run are not shown" in text


def test_the_texts_of_today_are_neither_weak_nor_unclear() -> None:
    today = {*PROMISES.values(), *FAULTS.values()}

    assert not {*TOO_WEAK} & today
    assert not {*CLEARER} & {text.partition(" (")[0] for text in today}
    assert {*CLEARER.values()} <= today


def test_a_violation_is_not_overlooked_and_a_soak_that_was_not_run_is_named() -> None:
    assert "**2 violations of a promise were found.**" in document(stored(violations={"no lease is lost": 2}))
    assert "| order | - | 1 |" in document(stored(violations={"order": 1}))
    assert "- Soak: no summary of a soak is stored" in document({**stored(), "soak": None})


def test_many_seeds_are_not_listed_one_by_one_and_take_overs_that_never_ended_have_no_time() -> None:
    text = document(stored(seeds=list(range(10, 50)), take_overs_s={"count": 3}, hand_overs_s={}))

    assert "with commit abcdef1234, 40 seeds from 10 to 49, on 2 cores" in text
    assert "another one granted" not in text
