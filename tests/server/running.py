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
from dataclasses import dataclass
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class RunningServer:
    """Started when entered, ended by its pid when left. It says by sd_notify when it is ready, so nobody polls."""

    def __init__(
        self, env: Mapping[str, str] | None = None, command: Sequence[str] = MODULE, cwd: Path | None = None
    ) -> None:
        self.port = free_port()
        self.command = [part.replace("{port}", str(self.port)) for part in command]
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-server-")
        self.cwd = cwd or Path(self.folder.name)
        settings = {"HOST": "127.0.0.1", "PORT": str(self.port), "SIMULATED_GPUS": "4", "REFRESH_INTERVAL": "0.1"}
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "LD_LIBRARY_PATH") if key in os.environ}
        self.env = {**kept, **settings, **(env or {}), "PYTHONPATH": str(ROOT)}
        self.log_path = Path(self.folder.name) / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        notify_path = f"{self.folder.name}/notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, self.log_path.open("wb") as log:
            ready.bind(notify_path)
            ready.settimeout(START_S)
            env = {**self.env, "NOTIFY_SOCKET": notify_path}
            self.process = subprocess.Popen(self.command, env=env, cwd=self.cwd, stderr=log, stdout=log)
            try:
                assert ready.recv(1024) == b"READY=1"
            except TimeoutError:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the server did not start: {self.log()}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.folder.cleanup()

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        answer = self.ask(path)
        assert answer.status == 200, answer
        return answer.json
