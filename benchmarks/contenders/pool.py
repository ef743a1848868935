"""This project: the blocking Python client, and the commands `run`, `batch` and `submit --array`."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.contenders.contender import Command, Held, Serving, Settings, finished
from benchmarks.processes import environment, pool_server, wait_until
from gpu_worker_pool.testing import ServerProcess

GPU_POOL = (sys.executable, "-m", "gpu_worker_pool")
WAIT_S = 60.0
# A sweep may take this long.
SWEEP_S = 180.0


class PoolTaker:
    """The blocking client."""

    def __init__(self, settings: Settings) -> None:
        from gpu_worker_pool import GPUWorkerPool  # noqa: PLC0415 - a client of another contender does not need it

        self._pool = GPUWorkerPool(settings["url"], **settings.get("options", {}))
        self._pool.start()

    def take(self) -> Held:
        assignment = self._pool.request_gpu(timeout=WAIT_S)
        return Held(time.monotonic(), os.getpid(), assignment)

    def release(self, held: Held) -> None:
        self._pool.release_gpu(held.what)

    def cycle(self) -> None:
        self.release(self.take())


class PoolQueue:
    """The commands, for a user whose home is a folder of the benchmark."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._env = environment({"HOME": str(folder), "GPU_SERVICE_ENDPOINT": server.url})

    def run_one(self, command: Command) -> None:
        finished([self._start("run", "--", *command)])

    def run_all(self, commands: Sequence[Command]) -> None:
        """Run them by `batch`."""
        lines = "".join(f"{shlex.join(command)}\n" for command in commands)
        finished([self._start("batch", "-", "--logs", str(self._folder / "logs"), stdin=lines)], SWEEP_S)

    def run_array(self, commands: Sequence[Command]) -> None:
        """Run them by `submit --array`: a task for each command, which must all be the same."""
        over = self._folder / f"over-{time.monotonic_ns()}"
        array = [f"--array=0-{len(commands) - 1}", "--", *commands[0]]
        done = subprocess.run(
            [*GPU_POOL, "submit", *array], env=self._env, check=True, capture_output=True, text=True, timeout=SWEEP_S
        )
        job_id = done.stdout.split()[0]
        # It is skipped if a task has failed.
        finished([self._start("submit", f"--after={job_id}", "--", "touch", str(over))])
        wait_until(over.exists, f"array {job_id} has ended well", SWEEP_S)

    def line_up(self, commands: Sequence[Command]) -> Callable[[], None]:
        """Let each wait in a `run` of its own."""
        # Else the first might wait for a client that has just ended, and a later one overtake it.
        wait_until(lambda: not self._server.json("/pool")["leases"], "all GPUs are free")
        runs: list[subprocess.Popen[bytes]] = []
        for number, command in enumerate(commands):
            runs.append(self._start("run", "--", *command))
            wait_until(lambda number=number: self._waiting() == number, f"{number} commands wait")  # type: ignore[misc]
        return lambda: finished(runs)

    def _waiting(self) -> int:
        pool = self._server.json("/pool")
        # None waits before the first holds the GPU.
        return len(pool["queue"]) if pool["leases"] else -1

    def _start(self, *words: str, stdin: str = "") -> subprocess.Popen[bytes]:
        command = [*GPU_POOL, *words]
        # A line for each job would be the work of this terminal.
        with (self._folder / "log").open("ab") as log:
            started = subprocess.Popen(command, env=self._env, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert started.stdin is not None
        started.stdin.write(stdin.encode())
        started.stdin.close()
        return started


@contextmanager
def serve(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run our server."""
    with pool_server(folder / "server", str(gpus)) as server:
        try:
            yield Serving({"url": server.url}, queue=PoolQueue(server, folder))
        finally:
            _end_keepers(folder)


def _end_keepers(home: Path) -> None:
    """End the keepers of jobs of the user whose home this is: they outlive the commands that started them."""
    mark = f"HOME={home}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


TAKERS = {"": PoolTaker}
