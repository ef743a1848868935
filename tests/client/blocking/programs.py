"""Programs that use the blocking pool, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from types import TracebackType
from typing import Self

from gpu_worker_pool.testing import ServerProcess
from tests.preloaded import PreloadedPopen
from tests.server.leasing import take
from tests.server.running import ROOT

END_S = 20.0


def active(server: ServerProcess) -> set[str]:
    return {lease["id"] for lease in server.json("/pool")["leases"] if lease["state"] == "active"}


def fill(server: ServerProcess) -> list[str]:
    """Another caller has all GPUs; its leases."""
    return [take(server)["id"] for _ in range(4)]


PRELUDE = """
import multiprocessing, os, random, signal, sys, threading, time
import gpu_worker_pool
from gpu_worker_pool import GPUWorkerPool, gpu
from tests.preloaded import PreloadedPopen

url = sys.argv[1]
sys.stdout.reconfigure(line_buffering=True)
"""


class Child:
    """A program in a process of its own, that says how far it is and is told to go on."""

    def __init__(self, server: ServerProcess, program: str, env: dict[str, str] | None = None) -> None:
        text = PRELUDE + textwrap.dedent(program)
        self.process: subprocess.Popen[str] = PreloadedPopen(
            [sys.executable, "-c", text, server.url],
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"it ended: {self.process.communicate(timeout=END_S)[1]}")
        return line.strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        """Its exit code and what it said, once it has ended by itself."""
        out, err = self.process.communicate("\n", timeout=END_S)
        return self.process.returncode, out.strip(), err
