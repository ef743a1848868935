"""For the tests of `gpu-pool run`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import end_all
from tests.server.leasing import OFTEN, wait_until_free


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", **OFTEN}) as server:
        yield server


@pytest.fixture
def server(two_gpus: ServerProcess) -> Iterator[ServerProcess]:
    yield two_gpus
    end_all()
    for lease in two_gpus.json("/leases")["leases"]:
        two_gpus.ask(f"/leases/{lease['id']}", "DELETE")
    wait_until_free(two_gpus)
