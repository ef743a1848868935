"""For the tests of submitted jobs: a server with two GPUs, and the jobs of a user, for a module at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs
from tests.server.leasing import OFTEN


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", **OFTEN}) as running:
        yield running


@pytest.fixture(scope="module")
def user(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UserJobs]:
    with UserJobs(tmp_path_factory.mktemp("user"), server) as jobs:
        yield jobs
