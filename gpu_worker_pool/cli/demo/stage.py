"""The worker processes of a demo. They end with the demo, however that ends."""

from __future__ import annotations

import asyncio
import contextlib
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
from .worker import PACE_BYTES, Crew


class DemoWorkers:
    """The workers, and the process that forked them. Each line that a worker writes is told to `on_line`."""

    def __init__(
        self, names: list[str], folder: DemoFolder, endpoint: str, seed: int, cheat: str | None,
        on_line: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self._names = names
        self._on_line = on_line
        self._rest = b""
        go, self._go = os.pipe()
        finish, finish_end = os.pipe()
        self._lines, lines = os.pipe()
        self._finish = os.fdopen(finish_end, "wb")
        self._ends = contextlib.ExitStack()
        for end in (self._go, self._lines):
            self._ends.callback(os.close, end)
        self._ends.callback(self._finish.close)
        crew = Crew(names, endpoint, str(folder.path), seed, cheat, os.getpid(), go, finish, lines)
        command = [sys.executable, "-m", "gpu_worker_pool.cli.demo.worker", json.dumps(asdict(crew))]
        self._log = folder.path / "workers.log"
        with self._log.open("wb") as log:
            # In a group of its own: Ctrl-C is for the demo, which then ends them in order.
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                command,
                env=inherited_environment(os.environ),
                cwd=folder.path,
                process_group=0,
                pass_fds=(folder.lock, go, finish, lines),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        for end in (go, finish, lines):
            os.close(end)
        asyncio.get_running_loop().add_reader(self._lines, self._read)

    def go(self, pace: float) -> None:
        """Let each of them begin."""
        os.write(self._go, f"{pace:<{PACE_BYTES}.4f}".encode() * len(self._names))

    def finish(self) -> None:
        """Let none of them ask again. Nothing is written: all of them see that the pipe ends."""
        self._finish.close()

    def last_words(self) -> str:
        """The last line that they wrote to standard error."""
        return last_line(self._log.read_text(encoding="utf-8", errors="replace"))

    def close(self) -> None:
        """Kill those that have not ended."""
        if self._process.returncode is None:  # not waited for yet, so the group is theirs
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            asyncio.get_running_loop().remove_reader(self._lines)
            self._ends.close()

    def _read(self) -> None:
        data = os.read(self._lines, 65536)
        if not data:
            asyncio.get_running_loop().remove_reader(self._lines)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for text in lines:
            self._on_line(json.loads(text))


def last_line(log: str) -> str:
    """The end of a log, with what to do about it where that is known."""
    text = next((line for line in reversed(log.splitlines()) if line.strip()), "nothing was said about it")
    return f"{text}; pip install 'gpu-worker-pool[all]'" if "No module named" in text else text
