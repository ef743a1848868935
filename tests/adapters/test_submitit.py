"""submitit's own executor and jobs, on jobs of the pool."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import submitit

from gpu_worker_pool.adapters.submitit import GpuPoolJob
from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs
from tests.server.leasing import eventually


@pytest.fixture
def user(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UserJobs]:
    with UserJobs(tmp_path, server) as jobs:
        for name, value in {**jobs.env, "GPU_POOL_SOCKET": ""}.items():
            monkeypatch.setenv(name, value)
        yield jobs


@pytest.fixture
def executor(user: UserJobs) -> submitit.AutoExecutor:
    GpuPoolJob.watcher.clear()  # one for all jobs of a process, and each test begins with number 1
    made = submitit.AutoExecutor(user.folder / "logs", cluster="gpupool")
    made.update_parameters(timeout_min=5, name="sweep")
    return made


def seen(number: int) -> tuple[int, str, str]:
    sys.stdout.write(f"number {number}\n")
    return number, os.environ["CUDA_VISIBLE_DEVICES"], submitit.JobEnvironment().job_id


def test_a_function_runs_on_gpus_of_its_own_and_its_result_and_output_come_back(
    executor: submitit.AutoExecutor, user: UserJobs
) -> None:
    executor.update_parameters(gpus_per_node=2, gpupool_options=["--preemptible"])
    job = executor.submit(seen, 7)
    number, devices, job_id = job.result()
    assert (number, len(devices.split(",")), job_id) == (7, 2, job.job_id)
    assert "number 7" in str(job.stdout())
    user.until(job.job_id)
    assert user.job(job.job_id).task.state == "ended"
    assert str(job.paths.stdout) in user.output(job.job_id)


def test_many_are_one_array_and_an_error_is_raised_with_its_trace(executor: submitit.AutoExecutor) -> None:
    jobs = executor.map_array(lambda number: 10 // number, [0, 5, 10])
    assert {job.job_id.split("_")[0] for job in jobs} == {jobs[0].job_id.split("_")[0]}
    assert [job.result() for job in jobs[1:]] == [2, 1]
    with pytest.raises(submitit.core.utils.FailedJobError, match="ZeroDivisionError"):
        jobs[0].result()


def test_a_job_is_cancelled_and_its_state_is_known(executor: submitit.AutoExecutor, user: UserJobs) -> None:
    job = executor.submit(time.sleep, 600)
    eventually(lambda: job.watcher.get_state(job.job_id, mode="force") == "RUNNING", "it runs")
    job.cancel()
    user.until(job.job_id)
    assert job.watcher.get_state(job.job_id, mode="force") == "CANCELLED"
    assert job.done(force_check=True)
    # One that was removed meanwhile does not hide the states of others.
    removed: GpuPoolJob[None] = GpuPoolJob(user.folder, "4711")
    other = executor.submit(seen, 1)
    other.wait()
    assert (removed.state, other.result()[0]) == ("REMOVED", 1)


class Counting(submitit.helpers.Checkpointable):
    """Writes a file, and waits; where it goes on from its checkpoint, it ends."""

    def __call__(self, file: str, *, restarted: bool = False) -> str:
        if not restarted:
            Path(f"{file}~").write_text(str(os.getpid()), encoding="utf-8")
            Path(f"{file}~").replace(file)
            time.sleep(600)
        return "went on"

    def checkpoint(self, file: str, *, restarted: bool = False) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self, file, restarted=True)


def test_a_preempted_job_writes_its_checkpoint_and_goes_on_from_it_when_it_runs_again(
    executor: submitit.AutoExecutor, user: UserJobs
) -> None:
    executor.update_parameters(gpus_per_node=4, gpupool_options=["--preemptible", "--priority", "-1"])
    file = user.folder / "ran"
    job = executor.submit(Counting(), str(file))  # type: ignore[no-untyped-call]
    eventually(file.exists, "it runs", within_s=60)
    subprocess.run([sys.executable, "-m", "gpu_worker_pool", "run", "--gpus", "4", "--", "true"], check=True)
    assert job.result() == "went on"


def test_what_is_wrong_is_said(executor: submitit.AutoExecutor) -> None:
    with pytest.raises(ValueError, match="tasks_per_node is 2; it must be 1"):
        executor.update_parameters(tasks_per_node=2)
    with pytest.raises(ValueError, match="at least 1"):
        executor.update_parameters(gpus_per_node=0)
    executor.update_parameters(gpupool_options=["--no-such-option"])
    with pytest.raises(RuntimeError, match="nothing was submitted"):
        executor.submit(seen, 1)
