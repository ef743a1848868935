"""The worker processes of a demo. They end with the demo, however it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gpu_worker_pool.testing import inherited_environment

from .folder import DemoFolder
from .worker import PACE_BYTES, WorkerSettings


class DemoWorkers:
    """The workers, and the process that forks them. `on_line` is called with each line of a worker."""

    def __init__(self, settings: WorkerSettings, folder: DemoFolder, on_line: Callable[[dict[str, Any]], None]) -> None:
        self._number, self._on_line, self._rest = len(settings.names), on_line, b""
        self._log = folder.path / "workers.log"
        go, go_end = os.pipe()
        self._go = os.fdopen(go_end, "wb")
        command = [sys.executable, "-m", "gpu_worker_pool.cli.demo.worker", str(go), json.dumps(asdict(settings))]
        with self._log.open("wb") as log:
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            env, kept = inherited_environment(os.environ), (folder.lock, go)
            # In a group of its own: Ctrl-C is for the demo, which then ends the workers in order.
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                command, env=env, cwd=folder.path, pass_fds=kept, process_group=0, **streams
            )
        os.close(go)
        assert self._process.stdin is not None  # noqa: S101 - for mypy
        assert self._process.stdout is not None  # noqa: S101
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        asyncio.get_running_loop().add_reader(self._stdout, self._read)

    def start(self, pace: float) -> None:
        self._go.write(f"{pace:<{PACE_BYTES}.4f}".encode() * self._number)
        self._go.close()

    def finish(self) -> None:
        """Let no worker ask again."""
        self._stdin.close()

    def last_error(self) -> str:
        return last_line(self._log.read_text(encoding="utf-8", errors="replace"))

    def close(self) -> None:
        if self._process.returncode is None:  # not waited for yet, so the group id is still theirs
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            asyncio.get_running_loop().remove_reader(self._stdout)
            for end in (self._go, self._stdin, self._stdout):
                end.close()

    def _read(self) -> None:
        data = os.read(self._stdout.fileno(), 65536)
        if not data:
            asyncio.get_running_loop().remove_reader(self._stdout)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for text in lines:
            self._on_line(json.loads(text))


def last_line(log: str) -> str:
    """The last line of a log, with what to do about it if that is known."""
    text = next((line for line in reversed(log.splitlines()) if line.strip()), "its log is empty")
    return f"{text}; pip install 'gpu-worker-pool[all]'" if "No module named" in text else text
