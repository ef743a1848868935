"""A directory of users that does not answer (NSS, LDAP) holds only the callers that it is asked about."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_worker_pool.testing import ServerProcess
from tests.other_user import ALICE, python_as
from tests.server.calls_as import ask_as
from tests.server.leasing import new_id, put, renew


def test_heartbeats_go_on_while_the_directory_does_not_answer(tmp_path: Path) -> None:
    python_as(ALICE)
    pipe = tmp_path / "directory"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "tests.server.slow_users", str(ALICE), str(pipe)]
    with ServerProcess(command=command) as server, ThreadPoolExecutor(1) as thread:
        lease = put(server, new_id(), ttl_s=60).json
        # Alice is asked about, and the directory does not answer.
        alice = thread.submit(ask_as, ALICE, server, [("PUT", f"/leases/{new_id()}", {})])
        assert pipe.read_text() == "asked\n"

        for _ in range(3):
            assert [each["id"] for each in renew(server, lease["id"])["renewed"]] == [lease["id"]]
        assert server.ask("/livez").status == 200

        pipe.write_text("this is Alice\n")
        (answer,) = alice.result()
        assert answer.json["owner"] == f"uid-{ALICE}"
        (again,) = ask_as(ALICE, server, [("PUT", f"/leases/{new_id()}", {})])
        assert again.status == 201, "she is known now, and not asked about again"


def test_health_searches_path_no_more_once_the_server_runs(tmp_path: Path) -> None:
    """A folder of PATH may be on a disk that hangs."""
    smi = tmp_path / "nvidia-smi"
    with ServerProcess({"PATH": f"{tmp_path}:{os.environ['PATH']}"}) as server:
        before = server.json("/health")["nvidia_smi_available"]
        smi.touch(0o755)

        assert server.json("/health")["nvidia_smi_available"] is before
