"""Amounts as people write and read them."""

from __future__ import annotations

import asyncio
import io
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.cli.output import Console
from gpu_worker_pool.cli.pools.report import show_clock
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.run.waiting_line import WaitingLine, waiting_text
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.cli.units import parse_duration_s, parse_memory_mb, show_duration, show_memory
from gpu_worker_pool.client.command_label import command_label, label_text
from gpu_worker_pool.client.events import ClientEvent
from gpu_worker_pool.client.guarded_lease import grace_after_loss
from gpu_worker_pool.wire.leases import ObstacleView


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


def test_the_waiting_line_names_each_holder_once_and_says_since_when() -> None:
    reason = "Position 1 of 2, waiting for 1 GPU: 2 leased by bob, ada (train.py); 1 has 90 % of its memory in use"
    obstacles = (
        leased(0, 940.0, "bob"),
        leased(1, 400.0, "ada (train.py)"),
        ObstacleView(uuid="GPU-2", code="over_memory", memory_percent=90),
    )
    bob, ada = show_clock(940.0, 1000.0), show_clock(400.0, 1000.0)
    assert waiting_text(reason, obstacles, 65, now_s=1000.0) == (
        f"waiting 1m 5s. Position 1 of 2, waiting for 1 GPU: 2 leased by bob {bob}, ada (train.py) {ada}; "
        "1 has 90 % of its memory in use"
    )


def test_a_holder_whose_time_is_not_known_is_named_without_one() -> None:
    reason = "Position 1 of 2, waiting for 1 GPU: 5 leased by ada, bob, eve and 2 more"
    obstacles = (
        leased(0, 940.0, "ada", "bob"),  # of several holders only the first one's time is known
        leased(1, 800.0, "eve"),
        leased(2, 400.0, "eve"),
        leased(3, 300.0, "dan"),
        leased(4, None, "fay"),
    )
    assert waiting_text(reason, obstacles, 65, now_s=1000.0) == (
        "waiting 1m 5s. Position 1 of 2, waiting for 1 GPU: "
        f"5 leased by ada, bob, eve {show_clock(400.0, 1000.0)} and 2 more"
    )
    assert waiting_text("in words of its own", obstacles, 65, now_s=1000.0) == "waiting 1m 5s. in words of its own"


def test_a_row_that_is_kept_whole_is_one_line_on_a_narrow_terminal_too() -> None:
    printed = io.StringIO()
    table = make_table("ID", "WORKER")
    table.add_row("0123456789", "a-worker-with-a-long-name-0123456789")
    print_table(Console(file=printed, is_terminal=True, width=20), table, is_whole=True)
    assert "a-worker-with-a-long-name-0123456789\n" in printed.getvalue()


class Heard(io.StringIO):
    """What is printed; `has` is set when these words are in it."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.has = asyncio.Event()
        self._words = words

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._words in " ".join(self.getvalue().split()):
            self.has.set()
        return written


async def test_a_narrow_terminal_shows_the_whole_waiting_line() -> None:
    reason = "Position 1 of 1, waiting for 1 GPU of model T4: 2 leased by ada (train.py), bob; 2 Simulated A100, not T4"
    heard = Heard(reason)
    console = Console(file=heard, is_terminal=True, width=80)
    line = WaitingLine(Servers(["http://box:1"]), console)
    line.note(ClientEvent("waiting", "w", "id", endpoint="elsewhere", detail=reason))
    async with asyncio.timeout(30):
        await heard.has.wait()
    await line.close()


def test_since_when_is_said_as_people_say_it() -> None:
    now = datetime(2026, 11, 16, 15, 0).astimezone()
    shown = [
        show_clock((now - timedelta(**ago)).timestamp(), now.timestamp())
        for ago in ({"minutes": 58}, {"days": 2}, {"days": 40})
    ]
    assert shown == ["since 14:02", "since Sat 15:00", "since 2026-10-07 15:00"]
    assert show_clock(None, 0.0) == "since an unknown time"
