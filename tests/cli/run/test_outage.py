"""A command with a lease of this machine, while its server is away, and when another caller ends the lease."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import MOST_S, end_all, gpu_pool, start_gpu_pool
from tests.server.leasing import eventually

TTL_S = 0.6
# It counts its own time, so the outage certainly lasts for several TTLs.
SCRIPT = f"touch began; until [ -e away ]; do sleep 0.02; done; sleep {4 * TTL_S}; touch still-here; exec sleep 600"


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running
        end_all()


def test_a_command_goes_on_without_its_server_and_is_told_who_ended_its_lease(
    server: ServerProcess, tmp_path: Path
) -> None:
    env = {"GPU_POOL_TTL": str(TTL_S)}
    run = start_gpu_pool("run", "--", "sh", "-c", SCRIPT, server=server, env=env, cwd=tmp_path)
    # The server has granted the lease a moment before its client knows.
    eventually((tmp_path / "began").exists, "the command has begun")
    lease = _active(server)
    assert lease is not None
    server.kill()
    (tmp_path / "away").touch()
    eventually((tmp_path / "still-here").exists, "the command is still there")
    server.start()
    known = eventually(lambda: _active(server), "the server knows the lease")
    assert known["id"] == lease["id"]

    released = gpu_pool("release", lease["id"], "--reason", "the demo", server=server, env=env)
    _, err = run.communicate(timeout=MOST_S)

    assert released.code == 0, released.err
    assert run.returncode == 125
    assert f"it was released by {user_name()}: the demo" in err


def _active(server: ServerProcess) -> dict[str, Any] | None:
    return next((lease for lease in server.ask("/leases").json["leases"] if lease["state"] == "active"), None)
