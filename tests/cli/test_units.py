"""Amounts as people write and read them."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.cli.pools.report import show_clock
from gpu_worker_pool.cli.run.waiting_line import waiting_text
from gpu_worker_pool.cli.units import (
    parse_duration_s,
    parse_memory_mb,
    parse_moment,
    show_duration,
    show_memory,
    show_moment,
)
from gpu_worker_pool.client.command_label import command_label, label_text
from gpu_worker_pool.client.guarded_lease import grace_after_loss
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.wire.leases import ObstacleView, WaitingLeaseView, WishesView


@pytest.mark.parametrize(
    ("text", "memory_mb"),
    [("12GB", 12288), ("12 GiB", 12288), ("12g", 12288), ("800M", 800), ("12000", 12000), ("1.5TB", 1572864)],
)
def test_memory(text: str, memory_mb: float) -> None:
    assert parse_memory_mb(text) == memory_mb


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("15m", 900), ("1h30m", 5400), ("2d", 172_800), ("0", 0), ("0.5s", 0.5), ("1h 5s", 3605)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "12 apples", "-5", "nan", "inf", "1e400", "0", "GB", "12GBs", "0.1"])
def test_what_is_no_memory(text: str) -> None:
    with pytest.raises(ValueError, match="write 12GB"):
        parse_memory_mb(text)


@pytest.mark.parametrize("text", ["", "soon", "-5", "nan", "inf", "5m1h", "1h1h", "2h30", "s", "9" * 400])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|is too long"):
        parse_duration_s(text)


@given(st.floats(0, 1e9))
def test_a_duration_that_is_shown_can_be_read_and_is_no_longer_than_it_was(seconds: float) -> None:
    shown = parse_duration_s(show_duration(seconds))
    assert shown <= seconds + 1
    assert shown >= seconds * 0.95 - 1


def test_memory_is_shown_in_what_suits_it() -> None:
    assert [show_memory(800), show_memory(1024), show_memory(81920)] == ["800 MiB", "1.0 GiB", "80.0 GiB"]


def test_what_others_see_of_a_command_has_none_of_its_options() -> None:
    assert command_label(["/usr/bin/python3", "runs/train.py", "--key", "secret"]) == "train.py"
    assert command_label(["python", "-c", "import secret"]) == "python"
    assert label_text("a\nb\u202ec" + "d" * 500).startswith("a b cd")


def test_a_command_whose_lease_is_lost_is_gone_before_the_server_gives_it_away() -> None:
    assert grace_after_loss(10, ttl_s=30) < 30 / 3
    assert grace_after_loss(2, ttl_s=30) == 2


def leased(number: int, since_at: float | None, *holders: str) -> ObstacleView:
    return ObstacleView(uuid=f"GPU-{number}", code="leased", holders=holders, since_at=since_at)


def waiting(*obstacles: ObstacleView, **facts: Any) -> WaitingLeaseView:
    reason = "Position 2 of 5, waiting for 1 GPU of model A100: 3 leased by alice (train.py), carol"
    told: dict[str, Any] = {"position": 2, "reason": reason, "wishes": WishesView(gpus=1, model="A100"), **facts}
    return WaitingLeaseView(id="a", state="queued", obstacles=obstacles, **told)


def test_the_waiting_line_is_one_line_with_the_time_before_the_people() -> None:
    of_no_use = ObstacleView(uuid="GPU-9", code="wrong_model", name="T4", wanted="A100")
    lease = waiting(
        leased(0, 400.0, "alice (train.py)"), leased(1, 940.0, "alice"), leased(2, 800.0, "carol"), of_no_use
    )
    alice, carol = show_clock(400.0, 1000.0), show_clock(800.0, 1000.0)
    assert waiting_text(lease, 1000.0) == f"for 1 A100 (2nd of 5). alice 2 {alice}, carol 1 {carol}"
    start: dict[str, Any] = {"expected_start_at": "1970-01-01T01:00:00Z", "expected_start_basis": "predicted"}
    at = show_moment(3600.0, 1000.0)
    assert f"(2nd of 5), starts about {at}. alice 2" in waiting_text(replace(lease, **start), 1000.0)
    declared = replace(lease, **start | {"expected_start_basis": "declared"})
    assert f", starts by {at}. alice 2" in waiting_text(declared, 1000.0)


def test_the_waiting_line_fits_and_says_how_many_are_left_out() -> None:
    crowd = waiting(*(leased(number, 940.0, f"user-{number}") for number in range(20)))
    line = waiting_text(crowd, 1000.0)
    assert len(line) <= 100
    assert re.search(r" and \d+ more$", line)
    # Of several holders of one GPU only the first one's time is known.
    shared = waiting(leased(0, 940.0, "ada", "bob"), wishes=WishesView(gpus=2, memory_mb=8192), position=11)
    assert waiting_text(shared, 1000.0) == "for 2 GPUs with 8.0 GiB (11th of 5). ada 1, bob 1"
    named = waiting(leased(3, None, "ada"), wishes=WishesView(gpus=2, among=("2", "3")))
    assert waiting_text(named, 1000.0) == "for GPUs 2, 3 (2nd of 5). ada 1"


def test_what_is_not_a_question_of_people_is_said_in_the_servers_words() -> None:
    draining = ObstacleView(uuid="GPU-1", code="draining")
    told = waiting(
        leased(0, 1.0, "bob"), draining, reason="Position 1 of 1, waiting for 1 GPU: 1 leased by bob; 1 draining"
    )
    assert waiting_text(told, 1000.0).endswith(". 1 leased by bob; 1 draining")
    assert waiting_text(waiting(reason="words of its own", position=None), 1000.0) == "for 1 A100. words of its own"


def test_since_when_is_said_as_people_say_it() -> None:
    now = datetime(2026, 11, 16, 15, 0).astimezone()
    shown = [
        show_clock((now - timedelta(**ago)).timestamp(), now.timestamp())
        for ago in ({"minutes": 58}, {"days": 2}, {"days": 40})
    ]
    assert shown == ["since 14:02", "since Sat 15:00", "since 2026-10-07 15:00"]
    assert show_clock(None, 0.0) == "since an unknown time"


# --- times of the past, and to come ---------------------------------------------------------------------------------------

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7d", NOW - 7 * 86_400),
        ("1h30m", NOW - 5400),
        ("2026-11-01", datetime(2026, 11, 1).timestamp()),  # noqa: DTZ001 - of the user's time zone
        ("2026-11-01T12:00:00+02:00", datetime(2026, 11, 1, 10, tzinfo=UTC).timestamp()),
        *((text, 0.0) for text in ("1950-01-01", "0001-01-01", "30000d", "1h99999999999m")),
    ],
)
def test_a_time_is_so_long_ago_or_a_date(text: str, expected: float) -> None:
    assert parse_moment(text, NOW, "--since", is_past=True) == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-11-17 18:00", "18:00"),
        ("18:00", "18:00"),
        ("09:00", "Wed 09:00"),
        ("1d12h", "Thu 00:00"),
        ("2026-12-01", "2026-12-01 00:00"),
    ],
)
def test_a_time_to_come_is_written_as_people_do(text: str, shown: str) -> None:
    now = datetime(2026, 11, 17, 12).astimezone().timestamp()
    assert show_moment(parse_moment(text, now, "--at"), now) == shown


@pytest.mark.parametrize("is_past", [True, False])
@pytest.mark.parametrize(
    "text", ["", "7", "1700000000", "noon", "2026", "99:00", "-2h", "2026-13-01", "99999x", "7d ago"]
)
def test_what_is_no_time_or_might_be_several_is_refused(text: str, is_past: bool) -> None:
    with pytest.raises(Failure, match=r"--at: .* is not a time; write "):
        parse_moment(text, NOW, "--at", is_past=is_past)


@pytest.mark.parametrize("text", ["37000d", "99999999999d", "2300-01-01", "9999-12-31 23:59"])
def test_a_time_that_nobody_can_mean_is_refused(text: str) -> None:
    with pytest.raises(Failure, match=r"--at: .* is too far ahead; it must be within a hundred years"):
        parse_moment(text, NOW, "--at")
