"""`ServerProcess`: a real server in a process of its own, for tests."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerDidNotStartError, ServerProcess

ENDED_WITHIN_S = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2xT4"}) as running:
        yield running


def take(server: ServerProcess, lease_id: str) -> int:
    return server.ask(f"/leases/{lease_id}", "PUT", body={"ttl_s": 60}).status


def test_it_answers_with_the_gpus_that_were_asked_for(server: ServerProcess) -> None:
    assert server.json("/gpu/count")["gpu_count"] == 2
    assert server.ask("/nothing").status == 404
    with pytest.raises(AssertionError, match="404"):
        server.json("/nothing")


def test_killed_and_started_again_it_has_its_port_and_its_leases(server: ServerProcess) -> None:
    assert take(server, "before") == 201
    url, pid = server.url, server.pid

    server.kill()
    assert not server.is_running
    with pytest.raises(ConnectionRefusedError):
        server.ask("/pool")
    server.start()

    assert (server.url, server.is_running) == (url, True)
    assert server.pid != pid
    assert server.ask("/leases/before").json["state"] == "active"
    assert server.ask("/leases/before", "DELETE").status == 200


def test_nobody_is_given_its_port_while_it_is_away() -> None:
    with closing(ServerProcess()) as away, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", away.port))


def test_a_server_that_does_not_start_says_why() -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('it is broken')")
    with pytest.raises(ServerDidNotStartError, match="it is broken"), ServerProcess(command=command):
        pass


# Started in a thread that ends: the server belongs to the process, not to the thread.
KILLED_WITH_ITS_SERVER = """
import os, signal, threading
from gpu_worker_pool.testing import ServerProcess
server = ServerProcess()
thread = threading.Thread(target=server.start)
thread.start()
thread.join()
server.json("/pool")
print(server.pid, server.folder, flush=True)
input()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_the_process_that_started_it_even_by_kill_9(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", KILLED_WITH_ITS_SERVER], env=env, stdin=pipe, stdout=pipe) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline().split()[0])
        with open(os.pidfd_open(pid), closefd=True) as server:  # noqa: PTH123 - a descriptor
            owner.communicate(b"\n", timeout=ENDED_WITHIN_S)
            assert owner.returncode == -signal.SIGKILL
            assert select.select([server], [], [], ENDED_WITHIN_S)[0], "the server outlived its owner"


def test_nothing_but_the_standard_library_is_loaded() -> None:
    program = "import sys, gpu_worker_pool.testing; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"websockets", "fastapi", "uvicorn", "pydantic", "gpu_worker_pool.client"} & set(loaded)


def test_a_wrong_description_of_simulated_gpus_is_an_error_and_not_a_server_without_gpus() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        ServerProcess({"SIMULATED_GPUS": "nonsense"})
