"""The servers of the examples: yours, or their own with simulated GPUs.

Your server is the one in --endpoint, GPU_STATS_SERVICE_ENDPOINTS, GPU_SERVICE_ENDPOINTS or GPU_SERVICE_ENDPOINT. The
examples hold its GPUs only for a moment, and leave out what would disturb other users.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_worker_pool
from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.pools.servers import Answer, Servers

VARIABLES = ("GPU_STATS_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINT")
START_S = 30.0
# A running server answers in a fraction of it.
ANSWER_S = 3.0
# The server ends when this process ends, in whatever way: 1 is PR_SET_PDEATHSIG and 15 is SIGTERM.
SERVE = (
    "import ctypes, runpy; ctypes.CDLL(None).prctl(1, 15); "
    "runpy.run_module('gpu_worker_pool.gpu_server', run_name='__main__')"
)


class ExampleServer:
    """A GPU server in its own process, with simulated GPUs and its own folder for leases."""

    def __init__(self, gpus: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port: int = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        # This environment may have the settings of your own server, so it is not passed on.
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
        self._env = {
            **kept,
            "PYTHONPATH": str(Path(gpu_worker_pool.__file__).resolve().parents[1]),
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "SIMULATED_GPUS": gpus,
            "REFRESH_INTERVAL": "0.1",
            "GPU_POOL_STATE_DIR": str(folder / "state"),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start it, or restart it with its old leases; it is ready a moment later."""
        with (self._folder / "log").open("ab") as log:
            command = [sys.executable, "-c", SERVE]
            self._process = subprocess.Popen(command, cwd=self._folder, env=self._env, stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        """Wait until it has read its GPUs and accepts requests."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.call("GET", "/readyz")
            except (urllib.error.URLError, ConnectionError):
                has_ended = self._process is None or self._process.poll() is not None
                if has_ended or time.monotonic() > deadline:
                    log = (self._folder / "log").read_text(encoding="utf-8")
                    raise RuntimeError(f"the example's server did not start:\n{log}") from None
                time.sleep(0.05)
            else:
                return

    def call(self, method: str, path: str) -> Any:
        """Make one call, as curl would, and return the answer."""
        request = urllib.request.Request(f"{self.url}{path}", method=method)  # noqa: S310 - our own server
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - our own server
            return json.load(answer)

    def kill(self) -> None:
        """Kill it as kill -9 does: it has no time to clean up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def example_servers(*gpus: str) -> Iterator[list[ExampleServer]]:
    """Start servers with these simulated GPUs, "2" or "1xA100-80GB,1xT4" each; the end of the block ends them."""
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="gpu-example-")))
        servers = []
        for number, simulated in enumerate(gpus, start=1):
            own_folder = folder / str(number)
            own_folder.mkdir()
            server = ExampleServer(simulated, own_folder)
            ends.callback(server.kill)
            server.launch()
            servers.append(server)
        for server in servers:
            server.wait_until_ready()
        yield servers


class NoServerError(Exception):
    """You named servers, and none of them can be used."""


def your_servers(endpoint: str | None) -> list[str]:
    """Return the servers that you named, those that answer first; none if you named none. NoServerError says what to do."""
    variable = next((name for name in VARIABLES if os.environ.get(name)), "")
    given, source = (endpoint, "--endpoint") if endpoint else (os.environ.get(variable, ""), variable)
    urls = [url.strip() for url in given.split(",") if url.strip()]
    if not urls:
        return []
    advice = f"{'leave out' if endpoint else 'unset'} {source}, and the examples start servers of their own"
    try:
        answers = asyncio.run(_ask(urls))
    except Failure as failure:
        raise NoServerError(f"{str(failure).replace('--endpoint', source, 1)}; correct it, or {advice}") from None
    if not any(answer.is_ok for answer in answers):
        reasons = "; ".join(f"{answer.url}: {str(answer.error).rstrip('.')}" for answer in answers)
        raise NoServerError(f"your GPU server cannot be used ({reasons}); fix it, or {advice}")
    return [answer.url for answer in sorted(answers, key=lambda answer: not answer.is_ok)]


async def _ask(urls: Sequence[str]) -> list[Answer]:
    async with Servers(urls, timeout_s=ANSWER_S) as servers:
        return await servers.ask_all("/gpu/summary")


@dataclass(frozen=True)
class Pool:
    """The servers of an example. `servers` are its own; there are none if it uses yours."""

    urls: Sequence[str]
    servers: Sequence[ExampleServer] = ()


@contextmanager
def example_pool(description: str, *gpus: str) -> Iterator[Pool]:
    """Use your servers if you named any, else start servers with these GPUs; print which."""
    # The examples print what happens, so the client need not log it too.
    logging.getLogger("gpu_worker_pool").addHandler(logging.NullHandler())
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--endpoint", metavar="URL", help="your GPU server; several are separated by commas")
    try:
        urls = your_servers(parser.parse_args().endpoint)
    except NoServerError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")
    if urls:
        print(f"Using your GPU server: {', '.join(urls)}")
        yield Pool(urls)
        return
    with example_servers(*gpus) as servers:
        urls = [server.url for server in servers]
        print(f"Started with simulated GPUs, for this example only: {', '.join(urls)}")
        yield Pool(urls, servers)


def title(text: str) -> None:
    """Print the headline of the next part."""
    print(f"\n--- {text}", flush=True)  # before other programs print
