"""Jobs of a batch whose lease the server ends: at their time limit they have failed, preempted they wait again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs
from tests.cli.own_process import end_all, start_gpu_pool
from tests.server.leasing import OFTEN, eventually, get, queue, release

# Does not end before it is told to.
LONG = "echo ran >> ran; while [ ! -e go-on ]; do sleep 0.02; done"


@pytest.fixture
def user(tmp_path: Path) -> Iterator[UserJobs]:
    settings = {"SIMULATED_GPUS": "1", "GPU_POOL_PREEMPT_GRACE": "1", **OFTEN}
    with ServerProcess(settings) as server, UserJobs(tmp_path, server) as jobs:
        yield jobs
        end_all()


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "jobs.txt.state").read_text(encoding="utf-8").splitlines()
    return [record for line in lines if "attempt" in (record := json.loads(line))]


def test_a_job_that_is_over_its_time_has_failed_with_that_reason(user: UserJobs, tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text("trap '' TERM; while :; do sleep 0.1; done\n", encoding="ascii")
    done = user.call("batch", "--time", "2s", "--json", "jobs.txt", code=1)
    (job,) = done.json["jobs"]
    assert (job["state"], job["exit_code"], job["end_reason"]) == ("failed", None, "time_limit")
    assert job["why"] == "the time limit of 2s is over"
    assert "the time limit of 2s is over: line 1" in done.err
    assert "(time limit); save your work" in Path(tmp_path / job["log"]).read_text(encoding="utf-8")
    assert [record["end_reason"] for record in records(tmp_path)] == ["time_limit"]


def test_a_preempted_job_is_run_again_before_those_behind_it_also_after_a_kill(user: UserJobs, tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text(f"{LONG}\necho last >> ran\n", encoding="ascii")
    ran, server = tmp_path / "ran", user.server
    assert server is not None
    arguments = ("batch", "--preemptible", "--json", "jobs.txt")
    killed = start_gpu_pool(*arguments, server=server, env=user.env, cwd=tmp_path)
    eventually(ran.exists, "the job runs")
    other = queue(server)
    assert get(server, other["id"], wait_s=30)["state"] == "active"
    eventually(lambda: server.json("/pool")["queue_length"] == 1, "it waits again")
    killed.kill()
    killed.communicate()
    release(server, other["id"])

    (tmp_path / "go-on").touch()
    user.call(*arguments)

    assert ran.read_text(encoding="ascii").splitlines() == ["ran", "ran", "last"]
    assert [record["end_reason"] for record in records(tmp_path)][-2:] == [None, None]
