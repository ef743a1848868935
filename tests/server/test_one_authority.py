"""Two servers on one machine do not grant the same GPU, whatever their users, ports and state directories."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from gpu_worker_pool.testing import COMMAND, ServerProcess, inherited_environment
from tests.gpus.fake_nvidia_smi import install
from tests.other_user import ALICE, folder_of, python_as
from tests.preloaded import PreloadedPopen
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


HOLDER = """
import sys
from gpu_worker_pool import gpu
with gpu(service_endpoint=sys.argv[1]) as assignment:
    print(assignment.gpu_id, flush=True)
    sys.stdin.read()
"""


def test_holders_that_a_dead_server_left_keep_their_gpus_from_the_next_one(tmp_path: Path) -> None:
    smi = install(tmp_path)
    smi.say("".join(GPUS.replace("0, GPU-aaaa", f"{index}, GPU-{index}") for index in range(3)))
    scope = {"GPU_POOL_LOCK_SCOPE": f"test-{secrets.token_hex(4)}"}
    env = {**smi.environment(), "SIMULATED_GPUS": "", "LD_LIBRARY_PATH": "", **scope}
    own = {**inherited_environment(os.environ), **scope}
    with ExitStack() as stack:
        first = stack.enter_context(ServerProcess(env))
        # No mark of its own: another process names it, by HTTP.
        bare = stack.enter_context(subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE))
        stack.callback(bare.kill)
        named = {"pid": bare.pid, "host": socket.gethostname()}
        assert first.ask("/leases/bare", "PUT", body=named).json["is_local"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": own, "text": True}
        client = stack.enter_context(PreloadedPopen([sys.executable, "-c", HOLDER, first.url], **pipes))
        command = [
            sys.executable,
            "-m",
            "gpu_worker_pool",
            "run",
            "--endpoint",
            first.url,
            "--",
            "sh",
            "-c",
            "echo on; cat",
        ]
        run = stack.enter_context(PreloadedPopen(command, **pipes))
        stack.callback(run.kill)
        stack.callback(client.kill)
        assert client.stdout is not None
        assert run.stdout is not None
        assert client.stdout.readline().strip() in {"0", "1", "2"}
        assert run.stdout.readline() == "on\n"

        first.kill()
        second = stack.enter_context(ServerProcess(env))

        gpus = second.json("/pool")["gpus"]
        assert [gpu["verdict"]["code"] for gpu in gpus] == ["other_server"] * 3
        assert any(f"pid {bare.pid}, by the record /" in gpu["reason"] for gpu in gpus)
        assert any(f"pid {client.pid})" in gpu["reason"] for gpu in gpus)
        waiting = second.ask("/leases/next", "PUT", body={})
        assert (waiting.status, "free when that process ends" in waiting.json["reason"]) == (202, True)

        bare.kill()
        bare.wait()

        assert get(second, "next", wait_s=30)["state"] == "active"
