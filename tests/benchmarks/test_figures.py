"""A figure is the one that its rounds give, its target judges it, and the page shows both and no other number."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import count
from typing import Any

import pytest

from benchmarks.__main__ import DOCUMENT, PARTS, STORED
from benchmarks.document import PARTS as DESCRIBED
from benchmarks.document import document
from benchmarks.figures import Figure, alone, compare, in_turn
from benchmarks.targets import BY_ID, TARGETS, Target


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    figure = compare([2.0, 30.0, 8.0], [1.0, 20.0, 8.0], "s", "base")

    assert (figure.value, figure.beside, figure.ratio) == (8.0, 8.0, 1.5)
    assert (figure.low, figure.high, figure.rounds) == (1.0, 2.0, 3)


def test_contenders_take_turns_and_every_other_round_goes_backwards() -> None:
    order: list[str] = []
    values = count()

    def measure(name: str) -> float:
        order.append(name)
        return float(next(values))

    found = in_turn({"a": lambda: measure("a"), "b": lambda: measure("b")}, 3)

    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [0.0, 3.0, 4.0], "b": [1.0, 2.0, 5.0]}


def test_a_contender_that_fails_once_has_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([1.0])

    def fails_later() -> float:
        try:
            return next(answers)
        except StopIteration:
            raise RuntimeError("the disk is full") from None

    assert in_turn({"a": lambda: 1.0, "b": fails_later}, 3) == {"a": [1.0, 1.0, 1.0]}
    assert "b failed: the disk is full" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "value", "ratio", "verdict"),
    [
        (Target("a", "p", "w", at_most=1.25), 9.0, 1.25, "reached"),
        (Target("a", "p", "w", at_most=1.25), 9.0, 1.2501, "missed"),
        (Target("a", "p", "w", at_least=1.0), 9.0, 0.99, "missed"),
        (Target("a", "p", "w", at_most=0.06, unit="s"), 0.05, 2.0, "reached"),
        (Target("a", "p", "w", at_most=0.0, unit="leases"), 1.0, None, "missed"),
        # Unknown is not zero.
        (Target("a", "p", "w", at_most=1.25), 9.0, None, ""),
        (Target("a", "p", "w"), 9.0, 2.0, ""),
    ],
)
def test_a_target_bounds_the_ratio_or_the_value(
    target: Target, value: float, ratio: float | None, verdict: str
) -> None:
    assert target.verdict(value, ratio) == verdict


def test_each_figure_has_a_part_that_runs_and_is_described() -> None:
    assert len(BY_ID) == len(TARGETS)
    assert {target.part for target in TARGETS} == set(PARTS) == set(DESCRIBED)


# --- the page --------------------------------------------------------------------------------------------------------


def stored(**figures: Figure) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for name, figure in figures.items():
        part = {"date": "2026-11-18", "commit": "a1", "took_s": 71.0, "left_out": {"Slurm": "it is not installed"}}
        parts.setdefault(BY_ID[name].part, {**part, "figures": {}})["figures"][name] = asdict(figure)
    return {"machine": {"processor": "one of 79 cores"}, "parts": parts}


def test_the_page_shows_what_was_measured_and_what_was_not() -> None:
    text = document(
        stored(
            lease_full=compare([0.002, 0.003], [0.001, 0.002], "s", "base"),
            status_cpu=alone([0.13], "s", note="with 64 GPUs"),
        )
    )

    assert "full | 2.50 ms | base: 1.50 ms | 1.75 x | 1.50 x to 2 x | ≤ 1.25 x | **missed** |" in text
    assert "| `gpu-pool status`, processor time | 130 ms |  |  |  | ≤ 120 ms | **missed** |" in text
    assert "| `gpu-pool run -- true`, processor time | not measured yet |  |  |  | ≤ 220 ms |  |" in text
    assert "0 are reached, 2 missed and" in text
    assert "- status_cpu: with 64 GPUs" in text
    assert "- beside: Slurm: it is not installed" in text
    assert "Measured on 2026-11-18 with commit a1 in 71 s." in text
    assert text.count("not measured yet |") == len(TARGETS) - 2


def test_the_page_is_what_the_stored_results_make_it() -> None:
    data = json.loads(STORED.read_text(encoding="utf-8"))

    assert DOCUMENT.read_text(encoding="utf-8") == document(data), "do not edit it: python -m benchmarks --write"
