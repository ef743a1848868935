"""A batch that is killed and run again at once, and what its job file may hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.cli.batch.jobs import read_jobs
from gpu_worker_pool.cli.batch.state import last_starts
from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.cli.own_process import end_all, gpu_pool, start_gpu_pool
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
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", **OFTEN}) as running:
        yield running
        end_all()


def test_a_job_of_a_batch_that_was_killed_is_waited_for_and_never_runs_twice_at_a_time(
    server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "job.sh").write_text(STUBBORN, encoding="ascii")
    (tmp_path / "jobs.txt").write_text("# first line\nexec sh job.sh\n", encoding="ascii")
    said = tmp_path / "said"
    options = ("batch", "--parallel", "1", "--grace", "30s", "jobs.txt")
    env = {"GPU_POOL_TTL": "300"}
    killed = start_gpu_pool(*options, server=server, cwd=tmp_path, env=env)
    eventually(said.exists, "the job runs")
    second = gpu_pool(*options, server=server, cwd=tmp_path, env=env)
    assert (second.code, "another gpu-pool batch" in second.err) == (125, True)
    killed.kill()
    killed.wait()  # its pipes stay open: the guard has them, too
    resumed = start_gpu_pool(*options, server=server, cwd=tmp_path, env=env)
    assert resumed.stderr is not None
    line = resumed.stderr.readline()
    assert line.startswith("gpu-pool: job 2 still runs (pid ")
    assert line.endswith("under the batch that was killed; waiting for it\n")
    (tmp_path / "go-on").touch()
    resumed.communicate()
    killed.communicate()
    assert resumed.returncode == 0
    lines = said.read_text(encoding="ascii").splitlines()
    assert [word.split()[0] for word in lines] == ["start", "start"]  # one after the other
    assert gpu_pool(*options, server=server, cwd=tmp_path).code == 0  # it was written down


def test_a_file_with_a_nul_in_a_job_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_bytes(b"true\necho a\0b\n")
    done = called("batch", str(tmp_path / "jobs.txt"))
    assert done.code == 2
    assert "line 2 has a NUL character" in done.err


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85", "\x0c", "\x0b", "\x1c", "\r"])
def test_only_a_newline_ends_a_job(sign: str) -> None:
    (job,) = read_jobs(f"echo 'a{sign}b'\r\n")
    assert job.command == f"echo 'a{sign}b'"


def _start(job: str, batch: int) -> dict[str, Any]:
    about = {"job": job, "line": 1, "guard_pid": 7, "guard_started": 1.0, "batch_pid": batch, "batch_started": 2.0}
    return {**about, "boot_id": "boot", "pid_namespace": "ns"}


def test_jobs_that_the_last_batch_started_and_did_not_finish_may_still_run() -> None:
    records = [_start("a", 1), _start("b", 2), _start("c", 2), {"job": "b", "exit_code": 0}]
    assert [start.key for start in last_starts(records, "boot", "ns")] == ["c"]
    assert last_starts(records, "another boot", "ns") == []
