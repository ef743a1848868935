"""`gpu-pool explain` takes the number of a job."""

from __future__ import annotations

from gpu_worker_pool.jobs.submission import JobState
from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs
from tests.server.leasing import eventually, release, take


def test_a_job_is_explained_by_its_number_while_it_waits_and_once_it_runs(
    user: UserJobs, server: ServerProcess
) -> None:
    held = take(server, gpus=2)
    id_ = user.script("sleep 60", "--name", "mine")
    user.until(id_, JobState.WAITING)
    eventually(lambda: "for `mine`: position 1 of 1" in user.call("explain", id_).out, "it says why it waits")
    assert "leased by" in user.call("explain").out, "without a number: all that the user waits for"
    release(server, held["id"])
    user.until(id_, JobState.RUNNING)
    assert "holds GPU" in user.call("explain", id_).out
    user.call("cancel", id_)
    user.until(id_)
    eventually(lambda: "and ended" in user.call("explain", id_).out, "its GPU is free again")
    assert "there is no job or lease 4711" in user.call("explain", "4711", code=1).err
