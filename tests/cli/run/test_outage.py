"""A command with a lease of this machine, while its server is away, and when another caller ends the lease."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from tests.preloaded import PreloadedPopen, run_preloaded
from tests.server.leasing import eventually

TTL_S = 0.6


def test_a_command_goes_on_without_its_server_and_is_told_who_ended_its_lease() -> None:
    with ServerProcess() as server:
        env = {**os.environ, "GPU_POOL_TTL": str(TTL_S), "GPU_SERVICE_ENDPOINT": server.url}
        gpu_pool = [sys.executable, "-m", "gpu_worker_pool"]
        # The command counts its own time, so the outage certainly lasts for several TTLs.
        script = f"read line; sleep {4 * TTL_S}; echo still here; exec sleep 600"
        command = [*gpu_pool, "run", "--", "sh", "-c", script]
        with PreloadedPopen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as run:
            assert run.stdin is not None
            assert run.stdout is not None
            assert run.stderr is not None
            assert server.process is not None
            lease_id = eventually(lambda: _active(server), "it has a lease")["id"]
            server.process.kill()
            server.process.wait()
            run.stdin.write("the server is away\n")
            run.stdin.flush()
            assert run.stdout.readline() == "still here\n"
            server.start()
            assert eventually(lambda: _active(server), "the server knows the lease")["id"] == lease_id

            released = [*gpu_pool, "release", lease_id, "--reason", "the demo"]
            run_preloaded(released, env=env).check_returncode()

            assert run.wait() == 125
            assert f"it was released by {user_name()}: the demo" in run.stderr.read()


def _active(server: ServerProcess) -> dict[str, Any] | None:
    return next((lease for lease in server.ask("/leases").json["leases"] if lease["state"] == "active"), None)
