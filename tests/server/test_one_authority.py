"""Two servers on one machine do not grant the same GPU, whatever their users, ports and state directories."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpu_worker_pool.testing import COMMAND, ServerProcess
from tests.gpus.fake_nvidia_smi import install
from tests.other_user import ALICE, folder_of, python_as
from tests.server.leasing import get

GPUS = "0, GPU-aaaa, NVIDIA A100, 81920, 0, 0, 41, 61.50, 400.00\n"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach. pytest takes the rights on its own folders away when another run begins."""
    with TemporaryDirectory(prefix="gpu-pool-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_the_second_server_shows_the_gpus_and_grants_none_of_them(place: Path) -> None:
    command = python_as(ALICE, *COMMAND[1:])
    (place / "smi").mkdir()
    smi = install(place / "smi")
    # Alice may not be allowed to run the Python of the tests.
    code = smi.command.read_text(encoding="utf-8").partition("\n")[2]
    smi.command.write_text(f"#!{command[-len(COMMAND)]} -IS\n{code}", encoding="utf-8")
    smi.say(GPUS)
    (place / "smi" / "nvidia-smi.runs").touch()
    scope = {"GPU_POOL_LOCK_SCOPE": f"test-{secrets.token_hex(4)}"}
    env = {**smi.environment(), "SIMULATED_GPUS": "", "LD_LIBRARY_PATH": "", **scope}
    folder = folder_of(ALICE, place / "alice")
    for file in folder_of(ALICE, place / "smi").iterdir():
        os.chown(file, ALICE, ALICE)
    with ServerProcess(env) as first, ServerProcess(env, command=command, folder=folder) as second:
        assert second.json("/gpu/count")["gpu_count"] == 1, second.log()
        (gpu,) = second.json("/pool")["gpus"]
        assert (gpu["state"], gpu["verdict"]["code"]) == ("outside", "other_server")
        assert f"user root, pid {first.pid}); use it at http://localhost:{first.port}" in gpu["reason"]
        assert gpu["reason"] in second.json("/health")["reason"]
        assert gpu["reason"] in second.log()

        refused = second.ask("/leases/second", "PUT", body={})
        assert (refused.status, gpu["reason"] in refused.json["detail"]) == (422, True)
        assert first.ask("/leases/first", "PUT", body={}).status == 201

        first.kill()

        assert second.ask("/leases/second", "PUT", body={}).status == 422, "its leases may go on"


@pytest.mark.parametrize(("scope", "code"), [("test-", "other_server"), ("", "eligible")])
def test_servers_that_simulate_the_same_gpus_meet_only_in_a_scope(scope: str, code: str) -> None:
    own = f"{scope}{secrets.token_hex(4)}" if scope else ""
    env = {"SIMULATED_GPUS": "1", "GPU_POOL_NODE": "box", "GPU_POOL_LOCK_SCOPE": own}
    with ServerProcess(env) as first, ServerProcess(env) as second:
        (gpu,) = second.json("/pool")["gpus"]
        assert first.json("/pool")["gpus"][0]["uuid"] == gpu["uuid"]
        assert gpu["verdict"]["code"] == code


def test_what_another_user_leaves_on_the_machine_keeps_no_gpu_from_the_pool() -> None:
    """Servers once read the files and sockets of holders that every user can make."""
    scope = f"test-{secrets.token_hex(4)}"
    env = {"SIMULATED_GPUS": "1", "GPU_POOL_NODE": "box", "GPU_POOL_LOCK_SCOPE": scope}
    record = Path("/dev/shm", f"gpu-worker-pool.{sha256(scope.encode()).hexdigest()[:8]}.any")  # noqa: S108 - on purpose
    with ServerProcess(env) as server, socket.socket(socket.AF_UNIX) as mark:
        (gpu,) = server.json("/pool")["gpus"]
        mark.bind(f"\0gpu-worker-pool/holder/{scope}/{gpu['uuid']}/any")
        try:
            record.write_bytes(b"[" * 200_000 + b"\n")
            server.restart()

            assert server.ask("/leases/one", "PUT", body={}).status == 201, server.log()
        finally:
            record.unlink()


def test_a_holder_that_a_dead_server_left_and_that_uses_its_gpu_keeps_it_from_the_next_one(tmp_path: Path) -> None:
    """A server with another journal does not know the lease; it sees the process."""
    smi = install(tmp_path)
    env = {
        **smi.environment(),
        "SIMULATED_GPUS": "",
        "LD_LIBRARY_PATH": "",
        "GPU_POOL_LOCK_SCOPE": f"test-{secrets.token_hex(4)}",
    }
    smi.say(GPUS)
    with ServerProcess(env) as first, subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as holder:
        named = {"pid": holder.pid, "host": socket.gethostname()}
        assert first.ask("/leases/one", "PUT", body=named).json["is_local"]
        smi.say(GPUS.replace("81920, 0, 0,", "81920, 4096, 0,"), f"GPU-aaaa, {holder.pid}, 4096, cat\n")
        first.kill()
        with ServerProcess(env) as second:
            waiting = second.ask("/leases/next", "PUT", body={})
            assert (waiting.status, f"pid {holder.pid}" in waiting.json["reason"]) == (202, True), waiting.json

            holder.kill()
            holder.wait()
            smi.say(GPUS)

            assert get(second, "next", wait_s=30)["state"] == "active"
