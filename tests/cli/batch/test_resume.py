"""A batch that is killed and run again at once, and what its job file may hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.cli.batch.lines import read_lines
from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs
from tests.cli.own_process import end_all, start_gpu_pool
from tests.server.leasing import OFTEN, eventually

# Says when it starts and whether another one runs; ends on a SIGTERM only when it is told so.
STUBBORN = """\
trap '' TERM
mkdir running || echo twice >> said
echo start $$ >> said
while [ ! -e go-on ]; do sleep 0.02; done
rmdir running
"""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[UserJobs]:
    with ServerProcess({"SIMULATED_GPUS": "2", **OFTEN}) as server, UserJobs(tmp_path, server) as jobs:
        yield jobs
        end_all()


def test_a_job_of_a_batch_that_was_killed_is_waited_for_and_never_runs_twice_at_a_time(
    user: UserJobs, tmp_path: Path
) -> None:
    (tmp_path / "job.sh").write_text(STUBBORN, encoding="ascii")
    (tmp_path / "jobs.txt").write_text("# first line\nexec sh job.sh\n", encoding="ascii")
    said = tmp_path / "said"
    options = ("batch", "--parallel", "1", "--grace", "30s", "jobs.txt")
    env = {**user.env, "GPU_POOL_TTL": "300"}
    killed = start_gpu_pool(*options, server=user.server, cwd=tmp_path, env=env)
    eventually(said.exists, "the job runs")
    assert "another gpu-pool batch" in user.call(*options, code=125, env=env).err
    killed.kill()
    killed.communicate()
    resumed = start_gpu_pool(*options, server=user.server, cwd=tmp_path, env=env)
    assert resumed.stderr is not None
    line = resumed.stderr.readline()
    assert line.startswith("gpu-pool: job 2 still runs (pid ")
    assert line.endswith("under the batch that was killed; waiting for it\n")
    (tmp_path / "go-on").touch()
    resumed.communicate()
    assert resumed.returncode == 0
    # It was told to end, so it is not done; the two run one after the other.
    assert [word.split()[0] for word in user.lines("said")] == ["start", "start"]
    assert "all jobs were done before" in user.call(*options).err


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85", "\x0c", "\x0b", "\x1c", "\r"])
def test_only_a_newline_ends_a_job(sign: str) -> None:
    (job,) = read_lines(f"echo 'a{sign}b'\r\n")
    assert job.command == f"echo 'a{sign}b'"
