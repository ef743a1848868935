"""The disk is full: nothing is granted or ended that is not written, holders keep what they have, and all goes on afterwards."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.e2e.worker import call

ANSWER_S = 20.0


def ask(server: ServerProcess, method: str, lease: str) -> tuple[int, str | None]:
    """Status and state."""
    path, body = f"/leases/{lease}", {"ttl_s": 60.0} if method == "PUT" else None
    status, answer = call(server.port, method, path, body, ANSWER_S)
    return status, answer.get("state")


def limit_files(server: ServerProcess, size: int | None) -> None:
    """Every write to a file fails from now on, or none does any more."""
    assert server.process is not None
    hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


@pytest.fixture
def state() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="gpu-state-") as folder:
        yield {"SIMULATED_GPUS": "2", "GPU_POOL_STATE_DIR": folder}


def fill_disk(server: ServerProcess) -> None:
    assert ask(server, "PUT", "holder") == (201, "active")
    limit_files(server, 0)
    assert ask(server, "PUT", "late") == (503, None)
    assert ask(server, "DELETE", "holder") == (503, None)
    status, renewed = call(server.port, "POST", "/leases/renew", {"ids": ["holder"]}, ANSWER_S)
    assert (status, renewed["lost"]) == (200, [])


def test_killed_while_the_disk_is_full(state: dict[str, str]) -> None:
    with ServerProcess(state) as server:
        fill_disk(server)

    with ServerProcess(state) as server:
        assert ask(server, "GET", "holder") == (200, "active")
        assert ask(server, "GET", "late") == (404, None)
        assert ask(server, "PUT", "late") == (201, "active")


def test_the_disk_has_room_again(state: dict[str, str]) -> None:
    with ServerProcess(state) as server:
        fill_disk(server)
        limit_files(server, None)

        # What could not be written is tried again by itself; until then asking again with the same id is harmless.
        while (late := ask(server, "PUT", "late"))[0] == 503:
            pass
        while (ended := ask(server, "DELETE", "holder"))[0] == 503:
            pass

        assert late[1] == "active"
        assert ended == (200, "ended")
    with ServerProcess(state) as server:
        assert ask(server, "GET", "late") == (200, "active")
        assert ask(server, "GET", "holder")[1] in {"draining", "ended"}
