"""A batch on its own machine, while its server is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs
from tests.cli.own_process import end_all, start_gpu_pool
from tests.server.leasing import OFTEN, eventually

TTL_S = 0.4
# Says when it starts and when it ends. The first one counts its own time, so it certainly ends several TTLs after the server.
JOB = """\
echo "start $1" >> said
until [ -e "end-$1" ]; do sleep 0.02; done
[ "$1" != a ] || sleep {outage_s}
echo "end $1" >> said
"""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[UserJobs]:
    with ServerProcess({"SIMULATED_GPUS": "2", **OFTEN}) as server, UserJobs(tmp_path, server) as jobs:
        yield jobs
        end_all()


def active(server: ServerProcess) -> set[str]:
    leases: list[dict[str, Any]] = server.json("/leases")["leases"]
    return {lease["id"] for lease in leases if lease["state"] == "active"}


def test_an_outage_of_the_server_loses_no_job_and_runs_none_twice(user: UserJobs, tmp_path: Path) -> None:
    server = user.server
    assert server is not None
    (tmp_path / "job.sh").write_text(JOB.format(outage_s=3 * TTL_S), encoding="ascii")
    (tmp_path / "jobs.txt").write_text("".join(f"exec sh job.sh {name}\n" for name in "abcd"), encoding="ascii")
    said = tmp_path / "said"

    def has_said(*lines: str) -> None:
        wanted = set(lines)
        eventually(lambda: said.exists() and wanted <= set(said.read_text(encoding="ascii").splitlines()), str(lines))

    batch = start_gpu_pool(
        "batch", "jobs.txt", server=server, cwd=tmp_path, env={**user.env, "GPU_POOL_TTL": str(TTL_S)}
    )
    has_said("start a", "start b")
    before = active(server)
    server.kill()
    (tmp_path / "end-a").touch()
    has_said("end a", "start c")  # on the same lease, which nobody else can be granted meanwhile
    server.start()
    assert before == active(server)
    for name in "bcd":
        (tmp_path / f"end-{name}").touch()
    _, err = batch.communicate(timeout=60)

    assert batch.returncode == 0, err
    assert sorted(said.read_text(encoding="ascii").split("\n")[:-1]) == sorted(
        f"{what} {name}" for what in ("start", "end") for name in "abcd"
    )
    assert active(server) == set()
