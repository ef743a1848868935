"""A real GPU server with simulated GPUs in a process of its own, for tests, benchmarks, demos and examples.

Only the standard library is loaded here; the server's own process loads what `gpu-worker-pool[server]` installs.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final, Self

START_S: Final = 30.0
# As `python -m gpu_worker_pool.gpu_server`, and it ends with the process that started it.
COMMAND: Final = (sys.executable, "-m", "gpu_worker_pool.testing")
# No setting of a server or a client is inherited: the caller's settings are for another pool.
_INHERITED: Final = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")


class ServerDidNotStartError(RuntimeError):
    """The server ended before it was ready, or took too long. The message ends with its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one call. The names of the headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @classmethod
    def read(cls, connection: http.client.HTTPConnection) -> Self:
        """Read the answer to the request that was sent over this connection."""
        response = connection.getresponse()
        return cls(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class ServerProcess:
    """A server on a loopback port, with four simulated GPUs unless `settings` say otherwise.

    `settings` are environment variables of the server. The port is a free one unless `port` is given, and stays reserved
    until `close`. State and log are in `folder`, or in a temporary folder that `close` removes. `command` starts the
    server in another way; `{port}` in it stands for the port. The context manager starts and closes the server. No
    method needs an event loop; asyncio code calls those that wait through `asyncio.to_thread`. The server ends when the
    process that started it does, even by kill -9. A ValueError says what is wrong with SIMULATED_GPUS. `popen` starts
    the process.
    """

    popen: ClassVar[type[subprocess.Popen[bytes]]] = subprocess.Popen

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        command: Sequence[str] = COMMAND,
        folder: Path | None = None,
        port: int = 0,
    ) -> None:
        # A server with a wrong value starts without simulated GPUs, which looks like a fault of something else.
        if simulated := (settings or {}).get("SIMULATED_GPUS"):
            from gpu_worker_pool.gpus.simulated import parse_spec  # noqa: PLC0415 - only where a test says how many

            parse_spec(simulated)
        self._held = ExitStack()
        # Bound and never listening: while the server is down, no other program gets the port.
        reserved = self._held.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", port))
        self.port = int(reserved.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder or Path(self._held.enter_context(TemporaryDirectory(prefix="gpu-pool-server-")))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.command = [part.replace("{port}", str(self.port)) for part in command]
        ours = {"HOST": "127.0.0.1", "PORT": str(self.port), "SIMULATED_GPUS": "4", "REFRESH_INTERVAL": "0.1"}
        # Several servers of tests may read the same stand-in for a GPU. No Unix socket where programs look for those of
        # real servers.
        state = {
            "GPU_POOL_STATE_DIR": str(self.folder / "state"),
            "GPU_POOL_LOCK_SCOPE": f"test-{os.getpid()}-{self.port}",
            "GPU_POOL_SOCKET": "",
        }
        self.env = {**inherited_environment(os.environ), **ours, **state, **(settings or {})}
        self.state_dir = Path(self.env["GPU_POOL_STATE_DIR"])
        self.process: subprocess.Popen[bytes] | None = None
        self._ready: socket.socket | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The id of the process that runs or ran last; -1 before the first start."""
        return self.process.pid if self.process else -1

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it is ready; kill one that runs, and keep its port, state and log."""
        self.launch()
        self.wait_until_ready()

    restart = start

    def launch(self) -> None:
        """Start the process without waiting for it: several servers start side by side this way."""
        self.kill()
        name = f"gpu-pool-{os.getpid()}-{secrets.token_hex(8)}"
        self._ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ready.bind(f"\0{name}")
        self._ready.settimeout(0.05)
        env = {**self.env, "NOTIFY_SOCKET": f"@{name}"}
        with (self.folder / "log").open("ab") as log:
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            # In a group of its own, because Ctrl-C is for the caller. The pipe ends when the caller does.
            self.process = self.popen(self.command, env=env, cwd=self.folder, process_group=0, **streams)

    def wait_until_ready(self, timeout_s: float = START_S) -> None:
        """Wait until the server reports that it is ready; ServerDidNotStartError if it does not."""
        deadline = time.monotonic() + timeout_s
        # Another thread may kill the server meanwhile, which closes the socket.
        while (ready := self._ready) and self.is_running and time.monotonic() < deadline:
            with suppress(OSError):
                if ready.recv(1024).startswith(b"READY=1"):
                    return
        self.kill()
        raise ServerDidNotStartError(f"the server did not start:\n{self.log()}")

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask the server to end with SIGTERM; kill it if it does not end in time."""
        if self.process is not None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill the server with -9; its state and log are left."""
        if self.process is not None and self.process.stdin is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
        if self._ready is not None:
            self._ready.close()
            self._ready = None

    def close(self) -> None:
        """Kill the server, free its port and remove its temporary folder."""
        self.kill()
        self._held.close()

    def log(self) -> str:
        """The text that the server has logged since its first start."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def ask(self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None, body: Any = None) -> Answer:
        """Make one call on a connection of its own. A body that is not bytes is sent as JSON."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)) as connection:
            sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, body=sent, headers=dict(headers or {}))
            return Answer.read(connection)

    def json(self, path: str) -> Any:
        """GET this path, which must be answered with 200, as JSON."""
        answer = self.ask(path)
        if answer.status != 200:
            raise AssertionError(f"GET {path}: {answer}")
        return answer.json


def inherited_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a process of a test pool needs, without any setting of a pool."""
    root, kept = str(Path(__file__).parents[1]), {name: environ[name] for name in _INHERITED if name in environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))}


def _end_with_the_caller() -> None:
    os.read(0, 1)  # nothing is ever written there: this returns when the caller has ended
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    import runpy

    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_end_with_the_caller, daemon=True).start()
    runpy.run_module("gpu_worker_pool.gpu_server", run_name="__main__", alter_sys=True)
