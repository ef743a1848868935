"""Jobs of a batch whose lease the server ends: at their time limit they have failed, preempted they wait again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.cli.batch.jobs import Batch, State, read_jobs
from gpu_worker_pool.cli.batch.state import StateFile
from gpu_worker_pool.cli.run.attempt import Outcome
from gpu_worker_pool.jobs.life import MAX_PREEMPTIONS
from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import end_all, gpu_pool, start_gpu_pool
from tests.server.leasing import OFTEN, eventually, get, queue, release

GOOD, PREEMPTED = Outcome(0), Outcome(None, "preempted", end_reason="preempted")
# Does not end before it is told to.
LONG = "echo ran >> ran; while [ ! -e go-on ]; do sleep 0.02; done"


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_PREEMPT_GRACE": "1", **OFTEN}) as running:
        yield running
        end_all()


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "jobs.txt.state").read_text(encoding="utf-8").splitlines()
    return [record for line in lines if "attempt" in (record := json.loads(line))]


def test_a_job_that_is_over_its_time_has_failed_with_that_reason(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text("trap '' TERM; while :; do sleep 0.1; done\n", encoding="ascii")
    done = gpu_pool("batch", "--time", "2s", "--json", "jobs.txt", server=server, cwd=tmp_path)
    assert done.code == 1
    (job,) = done.json["jobs"]
    assert (job["state"], job["exit_code"], job["end_reason"]) == ("failed", None, "time_limit")
    assert job["why"] == "the time limit of 2s is over"
    assert "the time limit of 2s is over: line 1" in done.err
    assert "(time limit); save your work" in Path(tmp_path / job["log"]).read_text(encoding="utf-8")
    assert [record["end_reason"] for record in records(tmp_path)] == ["time_limit"]


@pytest.mark.parametrize(("code", "state"), [("0", "done"), ("7", "failed")])
def test_a_job_that_ends_after_the_warning_is_done_only_with_0(
    server: ServerProcess, tmp_path: Path, code: str, state: str
) -> None:
    (tmp_path / "jobs.txt").write_text(f"trap 'exit {code}' TERM; while :; do sleep 0.02; done\n", encoding="ascii")
    done = gpu_pool("batch", "--time", "20s", "--json", "jobs.txt", server=server, cwd=tmp_path)
    assert done.json["jobs"][0]["state"] == state


def test_a_preempted_job_is_run_again_before_those_behind_it_also_after_a_kill(
    server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "jobs.txt").write_text(f"{LONG}\necho last >> ran\n", encoding="ascii")
    ran = tmp_path / "ran"
    arguments = ("batch", "--preemptible", "--json", "jobs.txt")
    killed = start_gpu_pool(*arguments, server=server, cwd=tmp_path)
    eventually(ran.exists, "the job runs")
    other = queue(server)
    assert get(server, other["id"], wait_s=30)["state"] == "active"
    eventually(lambda: server.json("/pool")["queue_length"] == 1, "it waits again")
    killed.kill()
    killed.communicate()
    release(server, other["id"])

    (tmp_path / "go-on").touch()
    done = gpu_pool(*arguments, server=server, cwd=tmp_path)

    assert done.code == 0
    assert ran.read_text(encoding="ascii").splitlines() == ["ran", "ran", "last"]
    assert [record["end_reason"] for record in records(tmp_path)] == ["preempted", None, None]


# --- which job is next -----------------------------------------------------------------------------------------------


def test_a_preempted_job_waits_at_its_place_and_costs_no_retry() -> None:
    first, second, third = read_jobs("a\nb\nc\n")
    batch = Batch([first, second, third], retries=0)
    assert (batch.next_job(), batch.next_job()) == (first, second)
    batch.ended(second, PREEMPTED)
    batch.ended(first, PREEMPTED)
    assert not batch.is_stopping
    assert [batch.next_job() for _ in range(4)] == [first, second, third, None]
    batch.ended(first, GOOD)
    assert batch.progress[first.key].attempts == 1


def test_a_job_is_not_preempted_for_ever_whatever_runs_there_were(tmp_path: Path) -> None:
    (job,) = read_jobs("a\n")
    batch = Batch([job])
    for _ in range(2):
        with StateFile(tmp_path / "state", is_fresh=False) as state:
            batch = Batch([job], retries=0)
            batch.skip(state.load(), state.preemptions)
            while batch.progress[job.key].preemptions < MAX_PREEMPTIONS and batch.next_job() is not None:
                state.note(job, 1, PREEMPTED)
                batch.ended(job, PREEMPTED)
    assert batch.next_job() == job
    batch.ended(job, PREEMPTED)
    found = batch.progress[job.key]
    assert found.state is State.FAILED
    assert found.outcome is not None
    assert found.outcome.why == f"preempted {MAX_PREEMPTIONS + 1} times"
