"""Every documented way to start, and what happens when it cannot."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import gpu_pool
from tests.preloaded import run_preloaded
from tests.server.leasing import eventually, release, take
from tests.server.running import MODULE, ROOT

WAYS = {
    "python -m": MODULE,
    "uvicorn": (
        sys.executable,
        "-m",
        "uvicorn",
        "gpu_worker_pool.gpu_server:app",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    ),
    "a script": (sys.executable, str(ROOT / "gpu_worker_pool" / "gpu_server.py")),
    "uvicorn.run(app)": (
        sys.executable,
        "-c",
        "from gpu_worker_pool.gpu_server import app; import uvicorn; uvicorn.run(app, host='127.0.0.1', port={port})",
    ),
}


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])  # noqa: S104 - what is tested
def test_a_server_that_others_reach_says_how_to_add_a_token(host: str) -> None:
    with ServerProcess({"HOST": host, "SIMULATED_GPUS": "1"}) as server:
        if host == "127.0.0.1":
            server.stop()
            assert "token" not in server.log()
            return
        said = r"there is no token yet. To allow a user: gpu-pool (.*)"
        advice = eventually(lambda: re.search(said, server.log()), "the server says how to add a token")
        done = gpu_pool(*shlex.split(advice[1].replace("NAME", "bob")))
        assert done.code == 0
        host_of_url = re.search(r"GPU_SERVICE_ENDPOINT=http://([^:]+):", done.out)
        assert host_of_url is not None
        assert not is_this_machine(host_of_url[1]), done.out
        assert [token["name"] for token in gpu_pool("token", "list", "--json", server=server).json["tokens"]] == ["bob"]


@pytest.mark.parametrize("way", WAYS)
def test_it_starts_by(way: str) -> None:
    with ServerProcess(command=WAYS[way]) as server:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=10) if way == "python -m" else None
        if connection is not None:
            connection.close()  # ready means that one can connect
        else:
            wait_until_it_listens(server)
        assert server.json("/gpu/count")["gpu_count"] == 4


def wait_until_it_listens(server: ServerProcess) -> None:
    """uvicorn itself begins to listen just after the application is ready; each attempt is answered at once."""

    def listens() -> bool:
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
            return True
        return False

    eventually(listens, "it listens")


def test_it_ends_gracefully_when_told_to() -> None:
    with ServerProcess() as server:
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=20)

        assert server.process.returncode in {0, -signal.SIGTERM}
        assert "Traceback" not in server.log()


def refuse(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    settings = {"SIMULATED_GPUS": "1", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **env}
    return run_preloaded(MODULE, env=settings, cwd=ROOT)


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = refuse({"HOST": "127.0.0.1", "PORT": port})

    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"gpu-worker-pool: cannot listen on 127.0.0.1:{port}: the port is in use; use the GPU server that runs there, or set PORT to another one if it is not one"
    ]


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_bad_host_is_one_clear_line(host: str) -> None:
    result = refuse({"HOST": host, "PORT": "0"})

    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert host in result.stderr


def test_more_workers_than_one_are_answered_with_a_warning() -> None:
    with ServerProcess({"WORKERS": "4"}) as server:
        assert "WORKERS=4" in server.log()
        assert server.json("/config")["server"]["workers"] == 4


def test_without_gpu_and_driver_it_answers_with_an_error_in_words() -> None:
    with ServerProcess({"SIMULATED_GPUS": "", "PATH": "/nonexistent", "LD_LIBRARY_PATH": ""}) as server:
        count = server.json("/gpu/count")

        assert count["gpu_count"] == 0
        assert "nvidia-smi" in count["error"]
        assert server.json("/gpu/stats")["gpus"] == []
        assert server.json("/gpu/summary")["gpus_summary"] == []
        health = server.json("/health")
        assert health["status"] == "degraded"
        assert health["nvidia_smi_available"] is False
        assert health["reason"]


def test_control_c_ends_it_without_a_traceback() -> None:
    with ServerProcess() as server:
        assert server.process is not None
        # The stop takes a moment while a stream is open, and people press it twice.
        with socket.create_connection(("127.0.0.1", server.port)) as stream:
            stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert stream.recv(1000).startswith(b"HTTP/1.1 200")
            server.process.send_signal(signal.SIGINT)
            while stream.recv(1000):
                pass
            server.process.send_signal(signal.SIGINT)
            server.process.wait(timeout=20)

        assert server.process.returncode == 130
        assert "Application shutdown complete" in server.log()
        assert "Traceback" not in server.log()


def test_without_its_packages_it_says_what_to_install_and_a_program_gets_an_import_error(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('not here', name='uvicorn')")
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    started = refuse(path)
    program = (
        "try:\n    from gpu_worker_pool.gpu_server import app\nexcept ImportError as error:\n    print(error.name)"
    )
    imported = subprocess.run(
        [sys.executable, "-c", program], env=path, capture_output=True, text=True, timeout=60, check=False
    )

    assert (started.returncode, started.stdout) == (1, "")
    assert started.stderr == "gpu-worker-pool: uvicorn is not installed; pip install 'gpu-worker-pool[server]'\n"
    assert (imported.stdout, imported.stderr) == ("uvicorn\n", "")


# Only a server of a fleet, or the page of the documents, or a command needs these.
NEVER_LOADED = {
    "asyncpg",
    "gpu_worker_pool.client",
    "gpu_worker_pool.core.fleet.election",
    "gpu_worker_pool.server.agent.agent",
    "pynvml",
    "websockets",
}
# The server, which writes at SIGUSR1 what it has loaded.
WRITES_MODULES = """
import pathlib, runpy, signal, sys
file = pathlib.Path("{file}")
signal.signal(signal.SIGUSR1, lambda *_: (file.with_suffix(".new").write_text(" ".join(sys.modules)), file.with_suffix(".new").rename(file)))
runpy.run_module("gpu_worker_pool.testing", run_name="__main__", alter_sys=True)
"""


class FreshServer(ServerProcess):
    """Not forked from a process that has loaded all of the server already, as those of other tests."""

    popen: ClassVar[type[subprocess.Popen[bytes]]] = subprocess.Popen


def test_a_server_of_one_box_does_not_load_what_others_need(tmp_path: Path) -> None:
    """What is loaded takes memory for as long as the server runs."""
    file = tmp_path / "modules"
    with FreshServer(
        {"SIMULATED_GPUS": "1"}, command=(sys.executable, "-c", WRITES_MODULES.format(file=file))
    ) as server:
        release(server, take(server)["id"])
        server.json("/gpu/summary")
        os.kill(server.pid, signal.SIGUSR1)
        loaded = set(
            eventually(lambda: file.read_text(encoding="utf-8") if file.exists() else None, "the file").split()
        )
    assert "gpu_worker_pool.server.app" in loaded
    assert loaded & NEVER_LOADED == set()
