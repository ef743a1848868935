"""The comparison of a fleet with Ray: what it says of measurements that were made up. The report's tests run it."""

from __future__ import annotations

import sys

import pytest

from benchmarks.fleet.__main__ import OURS, RAY, Measured, TakeOvers, main, tell_deaths, tell_speed
from benchmarks.shared.results import Results


def told(found: Measured, ours: TakeOvers | None, lost: list[str | float | None] | None = None) -> Results:
    results = Results("fleet", "About this.")
    tell_speed(results, 2, found)
    tell_deaths(results, 3, ours, lost)
    return results


def measured(*names: str) -> Measured:
    """The second one takes half as long, and does twice as much."""
    slow = {name: [0.02 / number, 0.04 / number] for number, name in enumerate(names, start=1)}
    return Measured(slow, slow, {name: [10.0 * number] * 2 for number, name in enumerate(names, start=1)}, slow)


def test_both_are_shown_side_by_side_with_the_ratio_of_their_rounds() -> None:
    results = told(
        measured(OURS.name, RAY.name), TakeOvers([3.0, 4.0], 5, 5, 4, 20.0), ["not within 20 s", "its task runs on"]
    )

    table, deaths = results.tables
    assert [(row[1], row[3], row[5]) for row in table.rows] == [
        ("30 ms", "15 ms", 2.0),
        ("30 ms", "15 ms", 2.0),
        (10.0, 20.0, 0.5),
        ("30 ms", "15 ms", 2.0),
    ]
    assert [row[1:] for row in deaths.rows] == [
        ["3.50 s", "5 of 5 leases go on"],
        ["not within 20 s", "its task runs on"],
    ]
    assert [(figure.value, figure.is_met) for figure in results.figures] == [(4.0, True)]


def test_without_ray_only_ours_is_shown() -> None:
    table, deaths = told(measured(OURS.name), TakeOvers([3.0], 5, 5, 4, 20.0)).tables

    assert [(row[1], row[3:]) for row in table.rows] == [
        ("30 ms", [None] * 3),
        ("30 ms", [None] * 3),
        (10.0, [None] * 3),
        ("30 ms", [None] * 3),
    ]
    assert (len(deaths.rows), deaths.note) == (1, "")


@pytest.mark.parametrize(
    "ours", [TakeOvers([3.0, 5.1], 5, 5, 4, 20.0), TakeOvers([3.0], 5, 4, 4, 20.0)], ids=["late", "a lease ended"]
)
def test_the_target_is_missed_if_a_take_over_is_late_or_a_lease_ended(ours: TakeOvers) -> None:
    (figure,) = told(measured(OURS.name), ours).figures

    assert figure.is_met is False
    assert f"{ours.held - ours.kept} leases ended" in figure.why


def test_a_take_over_that_could_not_be_measured_has_no_value() -> None:
    (figure,) = told(measured(OURS.name), None).figures

    assert (figure.value, figure.is_met) == (None, None)


def test_a_fleet_without_a_box_that_only_follows_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet", "--quick", "--boxes", "2"])

    with pytest.raises(SystemExit):
        main()
    assert "--boxes is 2; it must be more than the 2 that can lead" in capsys.readouterr().err
