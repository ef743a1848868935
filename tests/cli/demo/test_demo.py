"""`gpu-pool demo`: it shows what happens, measures what was promised, and can find a promise broken."""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from gpu_worker_pool.cli.demo.demo import is_any_visible
from gpu_worker_pool.cli.demo.folder import demo_folder, remove_dead_folders
from gpu_worker_pool.cli.demo.scene import Scene, WorkerRow
from gpu_worker_pool.cli.demo.summary import Record, handovers, ordered_pairs, render, summarize, survival
from gpu_worker_pool.cli.demo.view import picture
from gpu_worker_pool.history_check import check
from gpu_worker_pool.host.guard import descendants
from gpu_worker_pool.host.visible_devices import InstalledGpu
from gpu_worker_pool.run_history import Line, RunHistory
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.testing import inherited_environment
from tests.cli.own_process import GPU_POOL, MOST_S, environment, start_gpu_pool
from tests.cli.terminal import Terminal

# Short, but on a machine that is busy with other tests it may take its time.
SHORT = ("demo", "--workers", "6", "--gpus", "2", "--seconds", "3", "--limit", str(MOST_S))


# --- the real thing ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cheating() -> Iterator[subprocess.Popen[str]]:
    """A demo in which one worker, w06, goes on using its GPU after it gave it back. It runs beside the honest one."""
    # Longer, so that the cheat has several turns, whatever else the machine does.
    with start_gpu_pool(*SHORT, "--seconds", "6", "--json", "--cheat") as process:
        yield process
        process.kill()


def test_in_a_terminal_it_shows_what_happens_and_ends_with_what_was_measured(
    cheating: subprocess.Popen[str], tmp_path: Path
) -> None:
    written = tmp_path / "summary.json"
    command = f"exec {shlex.join([*GPU_POOL, *SHORT, '--json'])} > {written}"
    # Made for another pool, and none of this one's business.
    theirs = environment(extra={"CUDA_VISIBLE_DEVICES": "", "GPU_MEMORY_THRESHOLD_PERCENT": "0"})
    with Terminal(["/bin/sh", "-c", command], theirs, columns=100, rows=40) as terminal:
        terminal.wait_for("2 simulated GPUs, 6 worker processes")
        terminal.wait_for("waits, 1st")
        terminal.wait_for("kill -9 of w")
        terminal.wait_for("The server is away")
        terminal.wait_for("the server is back after")
        code = terminal.wait()
        shown = terminal.text

    summary = json.loads(written.read_text(encoding="utf-8"))
    assert (code, summary["is_ok"], summary["broken"]) == (0, True, [])
    assert "Every promise was kept" in shown
    assert f"GPUs held twice: {summary['held_twice']}" in shown
    assert f"of {summary['grants']} grants" in shown
    assert f"of {summary['order']['pairs']} pairs" in shown
    assert (
        f"{summary['killed_worker']['next_worker']}'s {summary['killed_worker']['handover_ms']:.1f} ms later" in shown
    )
    assert f"{summary['restart']['leases_survived']} of {summary['restart']['leases']} leases" in shown
    assert f"median {summary['wait_s']['median']:.2f} s" in shown
    # That all of it happened.
    assert summary["grants"] > summary["gpus"]
    assert summary["order"]["pairs"] > 0
    assert summary["restart"]["leases"] > 0
    assert summary["left_over"] == 0


def test_whoever_ends_it_its_processes_end_with_it(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    # So long that it kills none of its own before it is counted here.
    long = (*SHORT, "--seconds", "60")

    def folders() -> list[Path]:
        return list(tmp_path.glob("gpu-pool-demo-*"))

    with start_gpu_pool(*long, env=env) as killed, start_gpu_pool(*long, env=env) as interrupted:
        below = [descendants_of_working(killed), descendants_of_working(interrupted)]
        remove_dead_folders(tmp_path)
        assert len(folders()) == 2
        killed.kill()
        interrupted.send_signal(signal.SIGINT)
        codes = killed.wait(MOST_S), interrupted.wait(MOST_S)
        for pid in itertools.chain(*below):
            wait_for_end(pid)

    assert [len(pids) for pids in below] == [8, 8]  # the server, six workers and who forked them
    assert codes == (-signal.SIGKILL, 128 + signal.SIGINT)
    # One that is killed with -9 leaves its folder to the next one.
    assert len(folders()) == 1
    remove_dead_folders(tmp_path)
    assert folders() == []


def test_a_worker_that_ignores_the_pool_is_found(cheating: subprocess.Popen[str]) -> None:
    out, err = cheating.communicate(timeout=MOST_S)

    assert cheating.returncode == 1, (out, err)
    assert out, err
    summary = json.loads(out)
    assert not summary["is_ok"]
    assert summary["held_twice"] > 0
    broken = {item["promise"] for item in summary["broken"]}
    # If the server was killed while w06 cheated, w06 also has a GPU whose lease is over. On a busy machine the next worker may
    # try the lock only after w06 has left, and there may be no good moment to kill the server or a worker.
    assert {"held_twice"} <= broken <= {"held_twice", "lock", "lost", "not_shown"}, summary["broken"]
    assert all("w06" in item["text"] for item in summary["broken"] if item["promise"] in {"held_twice", "lost"})


def test_what_is_not_provably_a_dead_demos_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unknown, elsewhere = tmp_path / "gpu-pool-demo-unknown", tmp_path / "elsewhere"
    for folder in (unknown, elsewhere):
        folder.mkdir()
    (elsewhere / "lock").touch()
    link = tmp_path / "gpu-pool-demo-link"
    link.symlink_to(elsewhere)

    with demo_folder() as alive:
        remove_dead_folders(tmp_path)
        assert set(tmp_path.iterdir()) == {unknown, elsewhere, link, alive.path}
    assert set(tmp_path.iterdir()) == {unknown, elsewhere, link}
    link.rename(tmp_path / "another")
    elsewhere.rename(tmp_path / "gpu-pool-demo-dead")
    with demo_folder():
        assert not (tmp_path / "gpu-pool-demo-dead").exists()


# --- what reaches it -----------------------------------------------------------------------------------------------


def test_no_setting_of_another_pool_reaches_its_processes() -> None:
    settings = [name.upper() for name in ServerSettings.defaults()]
    client = ["GPU_SERVICE_ENDPOINT", "GPU_POOL_TOKEN", "GPU_POOL_TTL", "GPU_POLLING_INTERVAL"]
    given = dict.fromkeys([*settings, *client], "0") | {"PATH": "/bin"}

    assert "CUDA_VISIBLE_DEVICES" in settings
    assert inherited_environment(given).keys() == {"PATH", "PYTHONPATH"}


@pytest.mark.parametrize(
    ("value", "is_any"),
    [(None, True), ("", False), ("-1", False), ("-1,0", False), ("1", True), ("GPU-b", True), ("7", False)],
)
def test_a_machines_gpus_are_used_where_the_caller_sees_them(value: str | None, is_any: bool) -> None:
    assert is_any_visible(value, [InstalledGpu(0, "GPU-a"), InstalledGpu(1, "GPU-b")]) is is_any
    assert not is_any_visible(value, [])


def descendants_of_working(demo: subprocess.Popen[str]) -> list[int]:
    assert demo.stdout is not None
    assert any("holds GPU" in line for line in demo.stdout), demo.communicate()[1]
    return list(descendants(demo.pid))


def wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(descriptor) as process:
        ready, _, _ = select.select([process], [], [], MOST_S)
        assert ready, f"{pid} is still there"


# --- the checker ---------------------------------------------------------------------------------------------------


def turn(
    worker: str,
    number: int,
    fence: int,
    asked: float,
    queued: float | None,
    began: float,
    ended: float | None,
    gpu: int = 0,
) -> list[dict[str, Any]]:
    """The lines of one turn; without an end it is never over."""
    lease = f"{worker}-{number}"
    base = {"who": worker, "lease": lease}
    told = {"id": f"id-of-{lease}", "call": "PUT", "status": 202, "state": "queued", "sent": asked, "uuids": []}
    held = {"id": f"id-of-{lease}", "gpu_ids": [gpu], "uuids": [f"GPU-{gpu}"], "fence": fence, "for_s": 1.0}
    return [
        {**base, "what": "asks", "at": asked, "turn": number, "gpus": 1, "memory_mb": None, "priority": 0},
        *([] if queued is None else [{**base, **told, "what": "answered", "at": queued}]),
        *([] if began == inf else [{**base, **held, "what": "took", "at": began}]),
        *([] if ended is None else [{**base, "what": "left", "at": ended, "left_at": ended}]),
    ]


def by_demo(what: str, at: float, **facts: Any) -> dict[str, Any]:
    return {"what": what, "who": "demo", "at": at, **facts}


# b and c wait behind a, and are served in the order in which they came.
CLEAN = [
    *turn("a", 1, 1, asked=0.0, queued=None, began=0.1, ended=2.0),
    *turn("b", 1, 2, asked=0.5, queued=0.6, began=2.01, ended=3.0),
    *turn("c", 1, 3, asked=0.7, queued=0.8, began=3.02, ended=4.0),
]


def kinds(lines: Sequence[Line]) -> set[str]:
    return {violation.kind for violation in check(RunHistory([*lines]))}


def test_a_clean_record_passes() -> None:
    history = RunHistory([*CLEAN])
    assert check(history) == []
    assert len(list(ordered_pairs(history))) == 1


def test_two_on_one_gpu_at_once_are_found() -> None:
    early = turn("d", 1, 4, asked=3.1, queued=3.2, began=3.9, ended=5.0)

    assert kinds([*CLEAN, *early]) == {"held_twice"}
    assert kinds([*CLEAN, *turn("d", 1, 4, asked=3.1, queued=3.2, began=3.9, ended=5.0, gpu=1)]) == set()


def test_one_inside_a_long_holding_is_found_also_after_a_short_one() -> None:
    long = turn("d", 1, 4, asked=4.1, queued=None, began=4.2, ended=9.0)
    first = turn("e", 1, 5, asked=4.3, queued=None, began=4.4, ended=4.5)
    second = turn("f", 1, 6, asked=4.6, queued=None, began=4.7, ended=4.8)

    found = check(RunHistory([*CLEAN, *long, *first, *second]))

    assert [violation.kind for violation in found] == ["held_twice", "held_twice"]


def test_a_fence_that_shrank_or_was_given_twice_is_found() -> None:
    assert kinds([*CLEAN, *turn("d", 1, 3, asked=0.1, queued=None, began=4.2, ended=5.0, gpu=1)]) == {"fence"}
    assert kinds([*CLEAN, *turn("d", 1, 2, asked=4.1, queued=None, began=4.2, ended=5.0, gpu=1)]) == {"fence"}
    assert kinds([*CLEAN, *turn("d", 1, 0, asked=4.1, queued=None, began=4.2, ended=5.0, gpu=1)]) == {"fence"}
    assert kinds([*CLEAN, *turn("d", 1, 0, asked=0.05, queued=None, began=4.2, ended=5.0)]) == {"fence"}


def test_one_who_was_served_out_of_turn_is_found() -> None:
    """d is in line before e asks, on whatever GPU."""
    late = turn("d", 1, 5, asked=3.1, queued=3.2, began=6.0, ended=7.0, gpu=1)
    before = turn("e", 1, 4, asked=3.3, queued=3.4, began=4.5, ended=5.0)

    assert kinds([*CLEAN, *late, *before]) == {"order"}
    # Told to wait only after e asked: nobody can say who came first.
    assert kinds([*CLEAN, *turn("d", 1, 5, asked=3.1, queued=3.35, began=6.0, ended=7.0, gpu=1), *before]) == set()


def test_a_lock_that_was_taken_and_a_lease_that_was_lost_are_found() -> None:
    of_c = {"who": "c", "lease": "c-1"}
    assert kinds([*CLEAN, {**of_c, "what": "witness_busy", "at": 3.01, "uuid": "GPU-0"}]) == {"lock"}
    assert kinds([*CLEAN, {**of_c, "what": "lost", "at": 4.0, "reason": "x"}]) == {"lost"}
    assert kinds([*CLEAN, {**of_c, "what": "could_not_go_on", "at": 4.0, "reason": "x"}]) == {"lost"}


def test_one_who_waits_while_a_gpu_is_free_or_is_forgotten_is_found() -> None:
    lines = [*CLEAN, *turn("d", 1, 0, asked=3.1, queued=3.2, began=inf, ended=None)]

    assert kinds([*lines, by_demo("pool", 9.0, leases=["id-of-d-1"], free=[])]) == set()
    assert kinds([*lines, by_demo("pool", 9.0, leases=["id-of-d-1"], free=[0])]) == {"unserved"}
    assert kinds([*lines, by_demo("pool", 9.0, leases=[], free=[])]) == {"unserved"}
    assert kinds(lines) == {"unserved"}


def test_the_gpu_of_the_dead_has_to_be_handed_on() -> None:
    killed = [line for line in CLEAN if not (line["what"] == "left" and line["who"] == "a")]
    killed.append(by_demo("killed", 1.5, worker="a"))

    assert kinds(killed) == set()
    assert [round(took_s, 2) for _, _, took_s in handovers(RunHistory(killed))] == [0.51, 0.02]

    # Who came only after a GPU was free shows nothing of how fast it is handed on.
    late = RunHistory([*CLEAN, *turn("d", 1, 4, asked=4.5, queued=None, began=4.6, ended=5.0)])
    assert [after.who for _, after, _ in handovers(late)] == ["b", "c"]

    elsewhere = [
        {**line, "uuids": ["GPU-1"], "gpu_ids": [1]} if line["what"] == "took" and line["who"] != "a" else line
        for line in killed
    ]
    assert kinds(elsewhere) == {"dead_holder"}
    # Where nobody waited, nobody may have needed it.
    assert kinds([*elsewhere[:-1], {**elsewhere[-1], "has_waiters": False}]) == set()


def test_what_a_restart_changed_is_found() -> None:
    """Killed at 1.0: a holds GPU 0, b and c wait. The demo asks for each lease in its worker's place."""
    active: dict[str, Any] = {"status": 200, "state": "active", "uuids": ["GPU-0"], "fence": 1, "end_reason": None}
    queued: dict[str, Any] = {"status": 200, "state": "queued", "uuids": [], "fence": None, "end_reason": None}
    unknown: dict[str, Any] = {"status": 404, "state": None, "uuids": [], "fence": None, "end_reason": None}
    released = {**active, "state": "ended", "end_reason": "released"}

    def found(a: dict[str, Any], b: dict[str, Any] = queued, c: dict[str, Any] = queued, at: float = 1.9) -> RunHistory:
        base = {"what": "answered", "call": "GET", "sent": 1.85, "at": at}
        answers = [
            {**base, "who": who, "lease": f"{who}-1", **answer} for who, answer in zip("abc", (a, b, c), strict=True)
        ]
        return RunHistory([*CLEAN, by_demo("server_killed", 1.0), by_demo("server_back", 1.8), *answers])

    assert check(found(active)) == []
    assert survival(found(active), 1.0) == (1, 1, 2, 2)
    for wrong in (
        {**active, "fence": 2},
        {**active, "uuids": ["GPU-1"]},
        queued,
        unknown,
        released,
        {**released, "end_reason": "expired"},
    ):
        assert kinds(found(wrong).lines) == {"lost"}
        assert survival(found(wrong), 1.0) == (1, 0, 2, 2)
    for wrong in (unknown, {**queued, "state": "ended", "end_reason": "expired"}):
        assert kinds(found(active, c=wrong).lines) == {"lost"}
        assert survival(found(active, c=wrong), 1.0) == (1, 1, 2, 1)
    # Given back by its holder, who says so too.
    assert check(found(released, at=2.005)) == []


# --- what is shown -------------------------------------------------------------------------------------------------


def printed(what: RenderableType, width: int) -> str:
    text = StringIO()
    Console(width=width, file=text).print(what)
    return text.getvalue()


def test_the_summary_says_what_was_not_kept() -> None:
    lines = [*CLEAN, *turn("d", 1, 4, asked=3.1, queued=3.2, began=3.9, ended=5.0)]
    final = by_demo("final", 9.0, leases=[], gpus=[])
    record = Record([*lines, final], source="simulated", gpus=1, workers=4, seed=0, took_s=5.0)

    summary = summarize(record)

    assert (summary["is_ok"], summary["held_twice"], summary["grants"]) == (False, 1, 4)
    assert {item["promise"] for item in summary["broken"]} == {"held_twice", "not_shown"}
    shown = printed(render(summary), width=100)
    assert re.search(r"✗ +GPUs held twice: 1", shown)
    assert "d's turn 1 (fence 4) had it while c's turn 1 (fence 3) did, for 100 ms" in shown


def test_the_picture_fits_into_a_small_terminal() -> None:
    scene = Scene(10.0, {f"w{number:02}": WorkerRow(f"w{number:02}") for number in range(1, 13)}, began_at=100.0)
    scene.spans = {str(number): [] for number in range(4)}
    scene.is_up = True
    for at, line in enumerate(turn("w01", 1, 1, asked=100.1, queued=100.2, began=101.0, ended=None)):
        scene.add_line({**line, "at": line["at"] + at / 100})
    for number in range(20):
        scene.announce(101.0, f"something {number}")

    lines = printed(picture(scene, 103.0, 80, 24), width=80).splitlines()

    assert len(lines) <= 23  # one is the cursor's
    assert any("GPU 0" in line and "w01──" in line for line in lines)
    assert any("something 19" in line for line in lines)
    assert any("w01 GPU 0 2.0 s" in line for line in lines)
