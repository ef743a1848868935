"""`gpu-pool top`: what it draws for what is known, and how it behaves in a real terminal."""

from __future__ import annotations

import fcntl
import http.server
import json
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from gpu_worker_pool.cli.pools.naming import Naming, short_ids
from gpu_worker_pool.cli.pools.report import GpuReport, LeaseReport, PoolReport
from gpu_worker_pool.cli.table import Column, lay_out
from gpu_worker_pool.cli.top.frame import Frame, GpuRow, ServerState, without_twins
from gpu_worker_pool.cli.top.keys import DOWN, PAGE_UP, TAB, keys_in
from gpu_worker_pool.cli.top.sparkline import bar, sparkline
from gpu_worker_pool.cli.top.view import LEASES, QUEUE, Picture, Scroll, draw, draw_all
from gpu_worker_pool.testing import ServerProcess
from gpu_worker_pool.wire.leases import GpuRef, LeaseView
from gpu_worker_pool.wire.pool import PoolGpu, PoolView, ThresholdsView
from tests.cli.in_process import called
from tests.cli.own_process import GPU_POOL, environment, gpu_pool
from tests.cli.terminal import Terminal
from tests.client.foreign_servers import ForeignServer, Seen, answering
from tests.server.leasing import OFTEN, queue, release_all, take
from tests.server.running import ROOT, free_port

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SCREEN_ON, SCREEN_OFF, CURSOR_ON = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


# --- frames to draw ------------------------------------------------------------------------------------------------


NAMING = Naming("box", is_multi=False)
NAME = "Simulated NVIDIA A100-SXM4-80GB"


def gpu_ref(index: int) -> GpuRef:
    return GpuRef(gpu_id=index, uuid=f"GPU-{index}", name=NAME)


def gpu(index: int, **other: Any) -> GpuRow:
    form: dict[str, Any] = {
        "gpu_id": index,
        "uuid": f"GPU-{index}",
        "name": NAME,
        "state": "free",
        "reason": "available",
        "memory_total_mb": 81920.0,
        "memory_used_mb": 8192.0,
        "utilization_percent": 5.0,
    }
    return GpuRow(GpuReport(NAMING, PoolGpu(**{**form, **other})), 41.0, 62.0, 400.0, (0.0, 50.0, 100.0))


def lease(number: int, **other: Any) -> LeaseReport:
    form: dict[str, Any] = {
        "id": f"lease-{number}",
        "state": "active",
        "owner": f"user{number}",
        "gpus": (gpu_ref(number),),
        "requested_at": (NOW - timedelta(seconds=100)).isoformat(),
        "granted_at": (NOW - timedelta(seconds=90)).isoformat(),
        "expires_in_s": 25.0,
    }
    return LeaseReport(NAMING, LeaseView(**{**form, **other}))


def waiter(position: int, **other: Any) -> LeaseReport:
    reason = f"Position {position} of 9, waiting for 1 GPU: 3 leased by ada, bob and 1 more; 1 is kept for carol"
    form = {"state": "queued", "gpus": (), "position": position, "granted_at": None, "reason": reason}
    return lease(100 + position, **{**form, **other})


def server(
    gpus: list[GpuRow], leases: list[LeaseReport] | None = None, waiting: list[LeaseReport] | None = None, **other: Any
) -> ServerState:
    report = PoolReport(
        "box",
        "http://box:8000",
        view=PoolView(
            gpus=(),
            node="box",
            server_id="one",
            source="simulated",
            thresholds=ThresholdsView(memory_percent=80.0),
        ),
        leases=tuple(leases or ()),
        queue=tuple(waiting or ()),
    )
    return replace(ServerState("box", "http://box:8000", report, tuple(gpus), 0.2, None, is_stale=False), **other)


def frame(*servers: ServerState) -> Frame:
    return Frame(servers, NOW)


def shown(picture: Picture, width: int = 120) -> str:
    """What a person reads, as a terminal without colours shows it."""
    console = Console(width=width, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(picture)
    return captured.get()


A_FULL_POOL = frame(
    server(
        [gpu(index, state="leased", leases=(f"lease-{index}",)) for index in range(30)],
        [lease(index) for index in range(30)],
        [waiter(position) for position in range(1, 10)],
    )
)


# --- bars, sparklines, columns, keys -------------------------------------------------------------------------------


def test_a_sparkline_has_one_scale_and_shows_gaps_as_gaps() -> None:
    assert sparkline([0, 50, None, 100], 6) == "  ▁▄·▇"
    assert sparkline([0, 100], 1) == "▇"
    assert sparkline([], 3) == "   "


def test_a_bar_shows_where_the_threshold_is_and_unknown_is_no_empty_bar() -> None:
    assert bar(50, 10, style="cyan", mark_percent=80).plain == "━━━━━───┼─"
    assert bar(100, 10, style="cyan", mark_percent=80).plain == "━━━━━━━━╋━"
    assert bar(0, 4, style="cyan").plain == "────"
    assert bar(0.1, 4, style="cyan").plain == "╾───"
    assert bar(None, 4, style="cyan").plain.strip() == "?"


def test_columns_get_narrower_first_and_then_those_of_the_highest_rank_go() -> None:
    columns = [Column("A", 4, 20), Column("B", 4, 20, rank=2), Column("C", 4, 20, rank=1)]
    rows = [[Text("x" * 20), Text("x" * 20), Text("x" * 20)]]
    assert lay_out(columns, rows, 62) == {0: 20, 1: 20, 2: 20}
    assert lay_out(columns, rows, 14) == {0: 4, 1: 4, 2: 4}
    assert lay_out(columns, rows, 9) == {0: 4, 2: 4}
    assert list(lay_out(columns, rows, 3)) == [0]
    assert list(lay_out(columns, [[Text("x"), Text(""), Text("")]], 62)) == [0, 2]


def test_keys_are_told_apart_in_what_a_terminal_sends() -> None:
    assert keys_in(b"j\x1b[B\x1bOB\x1b[5~\t\x1b[99;5~q") == ["j", DOWN, DOWN, PAGE_UP, TAB, "q"]
    assert "q" not in keys_in(b"\x1b[1;5q")


# --- drawing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "height"), [(80, 24), (250, 70), (120, 40), (60, 15), (40, 10), (20, 5), (7, 2), (1, 1)]
)
def test_it_fits_every_screen(width: int, height: int) -> None:
    for case in (A_FULL_POOL, frame(ServerState("box", "http://box:8000")), frame(*[server([gpu(0)])] * 30)):
        lines = draw(case, width, height).lines
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width


def test_it_shows_a_gpu_its_holder_the_leases_and_the_queue_in_order() -> None:
    mine = lease(2, owner="ada", labels={"command": "python train.py"}, gpus=(gpu_ref(2), gpu_ref(3)))
    case = frame(
        server(
            [gpu(2, state="leased", leases=("lease-2",), memory_used_mb=49152.0), gpu(4)],
            [mine],
            [waiter(1, owner="bob"), waiter(2, owner="carol", priority=-3)],
        )
    )
    screen = shown(draw(case, 140, 30), 140)
    header, about, _, _, first, second, *rest = screen.splitlines()
    assert "2 GPUs: 1 free  1 leased  0 busy   queue 2" in header
    assert header.endswith("03:04:05")
    assert "● http://box:8000  box  simulated GPUs" in about
    for text in (
        "2   A100-SXM4-80GB leased",
        "48.0/80G",
        "5%",
        "▁▄▇",
        "41°C",
        "62/400W",
        "ada, python train.py, since ",
    ):
        assert text in first
    assert "4   A100-SXM4-80GB free" in second
    below = "\n".join(rest)
    assert "ada        2,3  1m 30s lease-2  python train.py" in below
    assert below.index("1 bob") < below.index("2 carol") < below.index("-3")
    assert "3 leased by ada, bob and 1 more; 1 is kept for carol" in below
    assert "Position" not in below


def test_more_than_fits_is_counted_and_can_be_scrolled_to() -> None:
    first = draw(A_FULL_POOL, 100, 24)
    assert "user0 " in shown(first, 100)
    assert f"… {30 - first.page_rows} more GPUs (↑↓ PgUp PgDn)" in shown(first, 100)
    down = draw(A_FULL_POOL, 100, 24, first.scroll.moved(first.page_rows))
    assert f"… {first.page_rows} more above, {30 - 2 * first.page_rows} more GPUs below" in shown(down, 100)
    end = draw(A_FULL_POOL, 100, 24, first.scroll.moved(1000))
    assert end.scroll.offsets["gpus"] == 30 - first.page_rows
    assert f"… {30 - first.page_rows} more above (" in shown(end, 100)
    assert draw(A_FULL_POOL, 100, 24, end.scroll.moved(-1)).scroll.offsets["gpus"] == 29 - first.page_rows
    # Tab gives the keys to the next section.
    leases = first.scroll.next_section()
    assert leases.section == LEASES
    assert leases.next_section() == Scroll(QUEUE, first.scroll.offsets)
    assert draw(A_FULL_POOL, 100, 24, leases.moved(2)).scroll.offsets == {"gpus": 0, "leases": 2, "queue": 0}


def test_those_in_a_long_queue_that_were_not_asked_for_are_counted_too() -> None:
    case = server([gpu(0)], [], [waiter(position) for position in range(1, 301)])
    assert case.report is not None
    long = frame(replace(case, report=replace(case.report, view=replace(case.report.view, queue_length=525))))
    first = draw(long, 100, 24, Scroll(QUEUE))
    assert "QUEUE (525)" in shown(first, 100)
    assert f"… {525 - first.page_rows} more waiting (↑↓ PgUp PgDn)" in shown(first, 100)
    near_the_end = draw(long, 100, 24, first.scroll.moved(300 - first.page_rows))
    assert f"{300 - first.page_rows} more above, 225 more waiting below" in shown(near_the_end, 100)
    end = shown(draw(long, 100, 24, first.scroll.moved(1000)), 100)
    assert "… and 225 more behind them" in end
    assert f"… {301 - first.page_rows} more above (" in end


def test_without_a_screen_everything_is_there_and_nothing_is_cut() -> None:
    text = shown(draw_all(A_FULL_POOL, 80, is_whole=True), 80)
    assert all(f"user{number} " in text for number in [*range(30), *range(101, 110)])
    assert text.count("3 leased by ada, bob and 1 more; 1 is kept for carol") == 9
    assert "quit" not in text


def test_a_server_that_stopped_answering_is_shown_as_it_was_and_counted_as_not_known() -> None:
    rows = [replace(gpu(0, state="leased", leases=("lease-0",)), is_stale=True), replace(gpu(1), is_stale=True)]
    down = server(rows, [lease(0)], [waiter(1)], age_s=72.0, error="connection refused", is_stale=True)
    screen = shown(draw(frame(down), 120, 30))
    assert "2 GPUs: 0 free  0 leased  0 busy  2 not known   queue ?" in screen
    assert "✗ http://box:8000  no answer, data 1m 12s old: connection refused" in screen
    assert "was leased" in screen
    assert "was free" in screen
    slow = shown(draw(frame(replace(down, error=None)), 120, 30))
    assert "○ http://box:8000  no answer, data 1m 12s old" in slow


def test_what_is_not_known_is_never_zero() -> None:
    blank = gpu(0, state="unknown", reason="its memory is unknown", memory_total_mb=None, utilization_percent=None)
    unknown = GpuRow(blank.report, utilization_percents=(None,))
    line = shown(draw(frame(server([unknown])), 120, 20)).splitlines()[4]
    assert line.split()[:3] == ["0", "A100-SXM4-80GB", "unknown"]
    assert line.count("?") == 6  # memory and utilization, each as a bar and in figures, temperature, power
    assert line.split().count("0") == 1
    never = shown(draw(frame(ServerState("box", "http://box:8000", error="connection refused")), 120, 20))
    assert "GPUs ?   queue ?" in never
    assert "LEASES (?)" in never
    assert "QUEUE (?)" in never


def test_text_from_servers_is_text() -> None:
    odd = "[red]x[/] :boom: 漢字"
    case = frame(server([gpu(0, state="busy", reason=odd)], [lease(0, owner=odd)], [waiter(1, owner=odd, reason=odd)]))
    assert shown(draw(case, 160, 30), 160).count(odd) == 4


def test_of_many_servers_those_that_do_not_answer_are_named_first_and_twins_count_once() -> None:
    ups = [server([gpu(0)], endpoint=f"box{number}", url=f"http://box{number}:8000") for number in range(40)]
    down = ServerState("gone", "http://gone:8000", error="no route to host")
    many = frame(*without_twins([*ups, down]))
    screen = shown(draw(many, 120, 24))
    assert "✗ gone  http://gone:8000  no answer: no route to host" in screen
    assert "… 36 more servers, all of them answer" in screen
    assert "1 GPU: 1 free" in screen  # all have the same server id
    assert shown(draw_all(many, 120, is_whole=True)).count("the same server as box0") == 39


def test_the_picture_in_the_documents_needs_nothing_from_elsewhere() -> None:
    svg = (ROOT / "docs" / "images" / "top.svg").read_text(encoding="utf-8")
    addresses = set(re.findall(r"(?:https?:)?//[^/\s\"'<>&]*", svg))
    assert {address for address in addresses if "127.0.0.1" not in address} == {"http://www.w3.org"}
    assert "@import" not in svg
    assert "@font-face" not in svg
    assert "GPUs" in svg


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[ServerProcess]:
    with ServerProcess(OFTEN) as running:
        yield running


@contextmanager
def odd_server() -> Iterator[str]:
    """One that answers everything with JSON that makes no sense."""

    class Odd(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            gpus = [
                {"gpu_id": "0", "uuid": "x", "name": "\x1b[2J", "leases": 3, "readings": [None, {"a": 1}], "power": []},
                {"uuid": "y", "readings": 5},
                {"uuid": 7},
            ]
            body = json.dumps({"gpus": [*gpus, None], "leases": [{}], "queue": {}, "thresholds": 1}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


def test_without_a_terminal_it_is_printed_once_with_servers_that_are_down_or_talk_nonsense(pool: ServerProcess) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with odd_server() as odd:
        done = gpu_pool("top", "-e", f"{pool.url},{odd}", "-e", gone)
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    assert f"● 127.0.0.1-{pool.port}  {pool.url}" in done.out
    assert f"{odd}  2 GPUs" in done.out
    assert f"{gone}  no answer: " in done.out
    assert done.out.count("A100-SXM4-80GB free") == 4


def test_a_width_that_is_asked_for_holds_in_a_pipe_too(pool: ServerProcess) -> None:
    wide, narrow = (called("top", "--once", server=pool, env=env).out for env in ({}, {"COLUMNS": "80"}))
    assert max(map(len, wide.splitlines())) > 80
    assert max(map(len, narrow.splitlines())) <= 80


def test_json_is_one_object_a_line_and_a_pool_of_the_dead_is_a_failure(pool: ServerProcess) -> None:
    done = gpu_pool("top", "--json", "--count", "2", "--interval", "0.1s", server=pool)
    assert done.code == 0
    assert [line["schema"] for line in done.json_lines] == ["gpu-pool/top/1"] * 2
    (seen,) = done.json_lines[1]["endpoints"]
    assert (seen["is_up"], len(seen["gpus"]), seen["queue_length"]) == (True, 4, 0)
    assert seen["gpus"][3].keys() >= {
        "id",
        "state",
        "memory_percent",
        "utilization_percent",
        "temperature_c",
        "power_draw_w",
    }
    gone = gpu_pool("top", "--json", "--once", server=f"http://127.0.0.1:{free_port()}")
    assert gone.code == 125
    assert "no GPU server can be used" in gone.err
    (down,) = gone.json["endpoints"]
    assert (down["is_up"], down["age_s"], down["gpus"]) == (False, None, [])


def test_json_has_all_who_wait_however_many() -> None:
    async def answer(seen: Seen) -> tuple[int, object]:
        most = int(seen.target.rpartition("queue=")[2]) if "queue=" in seen.target else 400
        return 200, {
            "gpus": [],
            "queue": [{"id": f"w{number}", "state": "queued"} for number in range(most)],
            "queue_length": 400,
        }

    with ForeignServer(answering(answer)) as many:
        (seen,) = called("top", "--json", "--once", server=many.url).json["endpoints"]
    assert (len(seen["queue"]), seen["queue_length"]) == (400, 400)


def left_as_it_was(terminal: Terminal) -> bool:
    """Whether the screen from before is back, with its cursor, and keys are echoed and read by lines again."""
    ended = terminal.all_output.rindex(SCREEN_OFF)
    flags = termios.tcgetattr(terminal._descriptor)[3]
    return (
        SCREEN_ON not in terminal.all_output[ended:]
        and CURSOR_ON in terminal.all_output[terminal.all_output.rindex(SCREEN_ON) :]
        and bool(flags & termios.ECHO and flags & termios.ICANON)
    )


def test_it_shows_grants_and_the_queue_live_pauses_and_quits(pool: ServerProcess) -> None:
    try:
        with Terminal([*GPU_POOL, "top", "--interval", "0.1s"], environment(pool)) as terminal:
            terminal.wait_for("4 GPUs: 4 free  0 leased")
            take(pool, owner="ada", gpus=4, labels={"command": "python train.py"})
            terminal.wait_for("4 GPUs: 0 free  4 leased")
            # Each is waited for: the rest of a screen may be drawn a moment later.
            terminal.wait_for("ada")
            terminal.wait_for("python train.py")
            queue(pool, owner="bob")
            terminal.wait_for("4 leased by ada")
            terminal.wait_for("1 bob")
            terminal.type("p")
            terminal.wait_for("paused at")
            terminal.type("pq")
            assert terminal.wait() == 0
            assert left_as_it_was(terminal)
    finally:
        release_all(pool)


def test_a_server_goes_and_comes_back_the_window_is_resized_and_ctrl_c_quits(pool: ServerProcess) -> None:
    with Terminal([*GPU_POOL, "top", "--interval", "0.1s"], environment(pool)) as terminal:
        terminal.wait_for("4 GPUs: 4 free")
        pool.kill()
        terminal.wait_for("no answer, data")
        terminal.wait_for("was free")
        pool.start()
        terminal.wait_for("4 GPUs: 4 free")
        fcntl.ioctl(terminal._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 9, 70, 0, 0))
        terminal._screen.resize(9, 70)
        terminal.wait_for("more GPUs (")
        terminal.type("\x1b[6~")
        terminal.wait_for("more above")
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert left_as_it_was(terminal)


@pytest.mark.parametrize(
    ("ids", "short"),
    [
        ([], ""),
        (["0", "3"], "0,3"),
        (["box:0", "box:3"], "box:0,3"),
        (["gpu-01:0", "gpu-01:3", "gpu-02:0", "gpu-02:3"], "gpu-01:0,3 gpu-02:0,3"),
    ],
)
def test_the_gpus_of_a_gang_are_named_by_node(ids: list[str], short: str) -> None:
    assert short_ids(ids) == short
