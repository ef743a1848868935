"""A real server in a real process, on a free port of this machine."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parent.parent.parent
MODULE = (sys.executable, "-m", "gpu_worker_pool.gpu_server")
START_S = 30.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


# Below those that systems hand out by themselves, and for each of the tests' processes others: where a test says that
# nobody listens, or starts a server anew, no other test must have got the port meanwhile.
LOWEST_PORT = 12_000
PORTS_EACH = 2_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = (LOWEST_PORT + _WORKER % 10 * PORTS_EACH + number % PORTS_EACH for number in count(os.getpid()))


def free_port() -> int:
    """Nobody listens there, and nobody else will."""
    for port in _ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("the ports never end")


def ask_over(
    connection: http.client.HTTPConnection,
    path: str,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: Any = None,
) -> Answer:
    """One call on a connection that is kept open."""
    sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, body=sent, headers=dict(headers or {}))
    return read_answer(connection)


def read_answer(connection: http.client.HTTPConnection) -> Answer:
    """The answer to what was sent over this connection."""
    response = connection.getresponse()
    return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


class RunningServer:
    """Started when entered, ended by its pid when left. It says by sd_notify when it is ready, so nobody polls.

    Its leases are kept in a folder of its own, and never where this machine's real ones are.
    """

    def __init__(
        self, env: Mapping[str, str] | None = None, command: Sequence[str] = MODULE, cwd: Path | None = None
    ) -> None:
        self.port = free_port()
        self.command = [part.replace("{port}", str(self.port)) for part in command]
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-server-")
        self.cwd = cwd or Path(self.folder.name)
        settings = {
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "SIMULATED_GPUS": "4",
            "REFRESH_INTERVAL": "0.1",
            "GPU_POOL_STATE_DIR": f"{self.folder.name}/state",
        }
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "LD_LIBRARY_PATH") if key in os.environ}
        self.env = {**kept, **settings, **(env or {}), "PYTHONPATH": str(ROOT)}
        self.state_dir = Path(self.env["GPU_POOL_STATE_DIR"])
        self.log_path = Path(self.folder.name) / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start, or start again: on the same port, with the same state and the same log."""
        notify_path = Path(self.folder.name) / "notify"
        notify_path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, self.log_path.open("ab") as log:
            ready.bind(str(notify_path))
            ready.settimeout(START_S)
            env = {**self.env, "NOTIFY_SOCKET": str(notify_path)}
            self.process = subprocess.Popen(self.command, env=env, cwd=self.cwd, stderr=log, stdout=log)
            try:
                assert ready.recv(1024) == b"READY=1"
            except TimeoutError:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the server did not start: {self.log()}") from None

    def kill(self) -> None:
        """kill -9; nothing of it is left but its state."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def restart(self) -> None:
        """kill -9 and start again."""
        self.kill()
        self.start()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.folder.cleanup()

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None, body: Any = None) -> Answer:
        """One call on a connection of its own. A body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            return ask_over(connection, path, method, headers, body)
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        answer = self.ask(path)
        assert answer.status == 200, answer
        return answer.json
