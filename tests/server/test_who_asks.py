"""Who is asking, over real sockets and as different Unix users. The rules by themselves are in tests/server/http."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.other_user import ALICE, BOB, python_as
from tests.server.calls_as import ask_as
from tests.server.leasing import assert_problem, new_id, put, release_all

ALICES, BOBS = f"uid-{ALICE}", f"uid-{BOB}"
WAYS = ["port", "socket"]


@pytest.fixture(scope="module")
def socket_path() -> Iterator[Path]:
    """Where other users can reach it, which they cannot in pytest's own folders."""
    with TemporaryDirectory(prefix="gpu-pool-sockets-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "pool.sock"


@pytest.fixture(scope="module")
def running(socket_path: Path) -> Iterator[ServerProcess]:
    settings = {
        "SIMULATED_GPUS": "4",
        "GPU_POOL_SOCKET": str(socket_path),
        "GPU_POOL_TOKENS": f"{ALICES}:alice-secret-token",
    }
    with ServerProcess(settings) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    release_all(running)


def way(socket_path: Path, name: str) -> Path | None:
    return socket_path if name == "socket" else None


@pytest.mark.parametrize("by", WAYS)
def test_the_owner_is_the_unix_user(server: ServerProcess, socket_path: Path, by: str) -> None:
    lease_id = new_id()
    calls = [
        ("PUT", f"/leases/{lease_id}", {}),
        ("PUT", f"/leases/{new_id()}", {"owner": BOBS}),
        ("PUT", f"/leases/{new_id()}", {"owner": ALICES}),
        ("GET", "/ui/data/me", None),
    ]
    own, anothers, named, me = ask_as(ALICE, server, calls, by=way(socket_path, by))

    assert (own.status, own.json["owner"]) == (201, ALICES)
    assert_problem(anothers, 403, ALICES, BOBS, "leave owner out")
    assert (named.status, named.json["owner"]) == (201, ALICES)
    assert me.json == {"name": ALICES, "is_admin": False, "role": "user"}


def test_the_holder_is_a_process_of_the_user_who_asks(server: ServerProcess) -> None:
    named = {"host": socket.gethostname(), "pid": os.getpid()}
    (refused,) = ask_as(ALICE, server, [("PUT", f"/leases/{new_id()}", named)])
    assert_problem(refused, 403, f"pid {os.getpid()} is a process of root", "Only an administrator")
    # For an administrator it is taken: the caller here is root, who may also name a process of Alice's.
    with subprocess.Popen(python_as(ALICE, "-c", "input()"), stdin=subprocess.PIPE) as process:
        lease = server.ask(f"/leases/{new_id()}", "PUT", body={**named, "pid": process.pid}).json
        process.kill()
    assert lease["is_local"]


@pytest.mark.parametrize("by", WAYS)
def test_nobody_changes_a_lease_of_another_user(server: ServerProcess, socket_path: Path, by: str) -> None:
    lease_id = new_id()
    assert ask_as(ALICE, server, [("PUT", f"/leases/{lease_id}", {})])[0].status == 201
    refused = ask_as(
        BOB,
        server,
        [
            ("PUT", f"/leases/{lease_id}", {}),
            ("DELETE", f"/leases/{lease_id}", None),
            ("POST", "/leases/renew", {"ids": [lease_id]}),
        ],
        by=way(socket_path, by),
    )
    for answer in refused:
        assert_problem(answer, 403, lease_id, ALICES, f"you are {BOBS}")
    assert server.json(f"/leases/{lease_id}")["state"] == "active"
    (gone,) = ask_as(ALICE, server, [("DELETE", f"/leases/{lease_id}", None)], by=way(socket_path, by))
    assert gone.json["state"] in {"ended", "draining"}


def test_only_administrators_may_use_the_operators_calls(server: ServerProcess, socket_path: Path) -> None:
    lease_id = new_id()
    assert ask_as(ALICE, server, [("PUT", f"/leases/{lease_id}", {})])[0].status == 201
    operating = [
        ("POST", f"/admin/leases/{lease_id}/revoke", None),
        ("POST", "/admin/gpus/0/drain", {"reason": "x"}),
        ("POST", "/admin/gpus/0/undrain", None),
        ("PUT", "/admin/ignored-processes/Xorg", None),
        ("DELETE", "/admin/ignored-processes/Xorg", None),
    ]
    for by in WAYS:
        for answer in ask_as(BOB, server, operating, by=way(socket_path, by)):
            assert_problem(answer, 403, "administrator", "root", BOBS)
    assert server.json(f"/leases/{lease_id}")["state"] == "active"
    assert server.ask(f"/admin/leases/{lease_id}/revoke", "POST").status == 200, "the tests run as the server's user"


def test_a_call_over_a_closed_connection_is_not_roots(server: ServerProcess) -> None:
    """A closed connection has no user; older kernels say that root has it."""
    send = """
import socket, sys
for linger in (0, 1) * 20:
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sent:
        sent.sendall(b"PUT /admin/ignored-processes/evil HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
        if linger:
            sent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
"""
    subprocess.run(python_as(ALICE, "-c", send, str(server.port)), check=True, cwd="/", timeout=60)
    assert ask_as(ALICE, server, [("GET", "/ui/data/me", None)])[0].status == 200, "all before it was read"
    assert server.json("/pool")["ignored_processes"] == []


def test_the_command_says_who_may(server: ServerProcess) -> None:
    lease_id = new_id()
    assert put(server, lease_id).status == 201
    endpoint = ("--endpoint", server.url)
    whose = str(server.json(f"/leases/{lease_id}")["owner"])
    for arguments in (("release", lease_id), ("drain", "0")):
        command = python_as(ALICE, "-m", "gpu_worker_pool", *arguments, *endpoint)
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/", timeout=60)
        assert (done.returncode, done.stdout) == (1, "")
        assert "administrator" in done.stderr
        assert ALICES in done.stderr
        assert whose in done.stderr
    assert server.json(f"/leases/{lease_id}")["state"] == "active"


def test_the_socket_is_for_all_users_and_its_directory_is_not(running: ServerProcess, socket_path: Path) -> None:
    assert stat.S_ISSOCK(socket_path.stat().st_mode)
    assert socket_path.stat().st_mode & 0o777 == 0o666
    assert f"listening on the Unix socket {socket_path}" in running.log()
    assert running.json("/config")["server"]["socket"] == str(socket_path)


def test_local_callers_by_the_socket_only(socket_path: Path) -> None:
    path = socket_path.parent / "only.sock"
    settings = {"SIMULATED_GPUS": "1", "GPU_POOL_SOCKET": str(path), "GPU_POOL_LOCAL": "socket"}
    with ServerProcess(settings) as server:
        assert_problem(put(server, new_id()), 401, str(path), "GPU_POOL_LOCAL=socket")
        (answer,) = ask_as(ALICE, server, [("PUT", f"/leases/{new_id()}", {})], by=path)
        assert answer.json["owner"] == ALICES
        assert server.ask(f"/leases/{answer.json['id']}", "DELETE").status == 401
        (gone,) = ask_as(ALICE, server, [("DELETE", f"/leases/{answer.json['id']}", None)], by=path)
        assert gone.status == 200
        command = python_as(ALICE, "-m", "gpu_worker_pool", "run", "--endpoint", server.url, "--", "true")
        used = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd="/",
            timeout=60,
            env={"GPU_POOL_SOCKET": str(path)},
        )
        assert used.returncode == 0, used.stderr
        server.kill()
        assert path.exists()
        server.start()
        assert "no Unix socket" not in server.log(), "the file of a dead server is replaced"
        server.stop()
        assert not path.exists()


def test_a_directory_that_others_may_write_to_gets_no_socket(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_SOCKET": str(folder / "pool.sock")}) as server:
        assert "no Unix socket" in server.log()
        assert "other users may write to it" in server.log()
        assert put(server, new_id()).status == 201
        assert list(folder.iterdir()) == []
        assert server.json("/config")["server"]["socket"] is None
